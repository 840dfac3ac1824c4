# SPDX-License-Identifier: Apache-2.0
"""Advances states through a chunk of rows: all at once, or row by row if that is faster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from metal_kernels.sequence_groups import Endings

# With G_t the product of the decays up to row t, a chunk's updates, outputs and states are (the
# chunkwise form of Yang et al. 2024, arXiv:2412.06464, and of Dao and Gu 2024, arXiv:2405.21060)
#
#     u_t = r_t (v_t - S (G_t k_t) - sum_{i<t} u_i (k_i . (G_t/G_i) k_t))      with the delta rule
#     u_t = r_t v_t                                                           without it
#     y_t = S (G_t q_t) + sum_{i<=t} u_i (k_i . (G_t/G_i) q_t)
#     S_m = G_m S + sum_{i<=m} u_i (k_i G_m/G_i)^T
#
# Ratios of decays are products of the decays in between, which are exact even if a decay is 0.


@dataclass(frozen=True)
class Rows:
    """L rows of n sequences, in float32, with HV = HK * G heads."""

    queries: mx.array  # [n, HK, 1, Q, DK], of the last Q rows; earlier rows have no outputs
    keys: mx.array  # [n, HK, 1, L, DK]
    values: mx.array  # [n, HK, G, L, DV]
    rates: mx.array  # [n, HK, G, L, 1], 0 for rows that change nothing
    decays: mx.array | None  # [n, HK, G, L, 1 or DK], 1 for rows that change nothing

    def part(self, start: int, stop: int) -> Rows:
        """Slices rows `start` to `stop`; unless these are all, each must have a query (Q = L)."""
        if start == 0 and stop == self.keys.shape[-2]:
            return self
        part = (..., slice(start, stop), slice(None))
        decays = None if self.decays is None else self.decays[part]
        return Rows(
            self.queries[part], self.keys[part], self.values[part], self.rates[part], decays
        )


@dataclass(frozen=True)
class ChunkStates:
    """States within a chunk that matrix products advanced as a whole."""

    before: mx.array  # [n, HK, G, DV, DK]
    keys: mx.array  # [n, HK, 1, L, DK]
    decays: mx.array  # [n, HK, G, L, 1 or DK]
    updates: mx.array  # [n, HK, G, L, DV], u

    def after(self, endings: Endings | None) -> mx.array:
        """Returns the [E, HK, G, DV, DK] states to store; None: each sequence's last state."""
        length = self.keys.shape[-2] if endings is None else endings.length
        before = self.before
        keys, decays, updates = (
            array[..., :length, :] for array in (self.keys, self.decays, self.updates)
        )
        if endings is not None and endings.sequences is not None:
            before, keys, decays, updates = (
                mx.take(array, endings.sequences, axis=0)
                for array in (before, keys, decays, updates)
            )
        applied = None
        if endings is not None and endings.applied is not None:
            applied = endings.applied[:, None, None, :, None]
            decays = mx.where(applied, decays, 1)
        total = decays
        if length > 1:
            following = mx.cumprod(decays, axis=-2, reverse=True, inclusive=False)
            total = following[..., :1, :] * decays[..., :1, :]
            if applied is not None:
                following = mx.where(applied, following, 0)
            if decays.shape[-1] == 1:
                updates = updates * following
            else:
                keys = keys * following
        elif applied is not None:
            updates = mx.where(applied, updates, 0)
        return mx.addmm(before * total, updates.swapaxes(-1, -2), keys)


def through_chunk(rows: Rows, state: mx.array, delta: bool) -> tuple[mx.array, ChunkStates]:
    """Advances [n, HK, G, DV, DK] float32 states through a chunk by matrix products.

    `rows` have decays. Returns [n, HK, G, Q, DV] outputs, and the states.
    """
    assert rows.decays is not None
    keys, decays, length = rows.keys, rows.decays, rows.keys.shape[-2]
    if length == 1:
        return _through_row(rows, state, delta)
    # Keys and queries go through the same products, so they are stacked.
    number = rows.queries.shape[-2]
    stack = _Stack(length, number, with_keys=delta)
    vectors = mx.concatenate([keys, rows.queries], axis=-2) if delta else rows.queries
    seen, products = _seen(stack, vectors, decays, state), _products(stack, vectors, keys, decays)
    updates = rows.values
    if delta:
        updates = (updates - seen[..., :length, :]) * rows.rates
        updates = _solve(products[..., :length, :] * rows.rates, updates)
    else:
        updates = updates * rows.rates
    outputs = mx.addmm(seen[..., -number:, :], products[..., -number:, :], updates)
    return outputs, ChunkStates(state, keys, decays, updates)


def _through_row(rows: Rows, state: mx.array, delta: bool) -> tuple[mx.array, ChunkStates]:
    """Like `through_chunk`, for a chunk of one row."""
    # Two products with vectors are faster here than one with both.
    assert rows.decays is not None
    keys, decays, transposed = rows.keys, rows.decays, state.swapaxes(-1, -2)

    def seen(vectors: mx.array) -> mx.array:
        if decays.shape[-1] > 1:
            return (vectors * decays) @ transposed
        return (vectors @ transposed) * decays

    updates = (rows.values - seen(keys) if delta else rows.values) * rows.rates
    within = (rows.queries * keys).sum(-1, keepdims=True) * updates
    return seen(rows.queries) + within, ChunkStates(state, keys, decays, updates)


@dataclass(frozen=True)
class _Stack:
    """Assigns each of M stacked vectors to a row: the keys of all L rows, then the last queries."""

    length: int  # L
    num_queries: int
    with_keys: bool  # else only queries

    def of(self, array: mx.array) -> mx.array:
        """Maps an array over rows, [..., L, *], to one over vectors, [..., M, *]."""
        queries = array[..., self.length - self.num_queries :, :]
        return mx.concatenate([array, queries], axis=-2) if self.with_keys else queries

    def of_np(self, array_np: np.ndarray) -> np.ndarray:
        queries_np = array_np[self.length - self.num_queries :]
        return np.concatenate([array_np, queries_np]) if self.with_keys else queries_np


def _seen(stack: _Stack, vectors: mx.array, decays: mx.array, state: mx.array) -> mx.array:
    """Returns S (G_t x_t), [n, HK, G, M, DV], for vectors x, [n, HK, 1, M, DK]."""
    passed, transposed = stack.of(mx.cumprod(decays, axis=-2)), state.swapaxes(-1, -2)
    if decays.shape[-1] > 1:
        return (vectors * passed) @ transposed
    return (vectors @ transposed) * passed


@dataclass(frozen=True)
class RowStates:
    """States before a chunk that was advanced row by row, and after each of its rows."""

    states: tuple[mx.array, ...]  # L + 1 arrays [n, HK, G, DV, DK]

    def after(self, endings: Endings | None) -> mx.array:
        """Returns the [E, HK, G, DV, DK] states to store; None: each sequence's last state."""
        if endings is None:
            return self.states[-1]
        last, sequences = self.states[endings.length], endings.sequences
        if endings.applied is None:
            return last if sequences is None else mx.take(last, sequences, axis=0)
        if sequences is None:
            sequences = mx.arange(len(last), dtype=mx.int32)
        number = endings.applied.astype(mx.int32).sum(-1)
        states = mx.concatenate(list(self.states[: endings.length + 1]))
        return mx.take(states, number * len(last) + sequences, axis=0)


def through_rows(rows: Rows, state: mx.array, log_rates: mx.array) -> tuple[mx.array, RowStates]:
    """Advances [n, HK, G, DV, DK] float32 states through a chunk row by row, without delta rule.

    Decays are exp(rate * log_rates), with log_rates [HK, G, 1, DK].
    Returns [n, HK, G, Q, DV] outputs, and the states.
    """
    # Faster than `through_chunk` if each head has its own decays per key, and a single value.
    flat = (*state.shape[:2], -1, state.shape[-1])
    inputs = (rows.values * rows.rates)[..., None]  # [n, HK, G, L, DV, 1]
    states, outputs = [state], []
    without_output = rows.keys.shape[-2] - rows.queries.shape[-2]
    for at in range(rows.keys.shape[-2]):
        decays = mx.exp(rows.rates[..., at, :, None] * log_rates)
        states.append(states[-1] * decays + inputs[..., at, :, :] * rows.keys[..., at, None, :])
        if at >= without_output:
            query = rows.queries[:, :, 0, at - without_output, :, None]
            outputs.append((states[-1].reshape(flat) @ query).reshape(state.shape[:-1]))
    outputs_of_all = outputs[0][..., None, :] if len(outputs) == 1 else mx.stack(outputs, axis=-2)
    return outputs_of_all, RowStates(tuple(states))


def _ratios(decays: mx.array) -> mx.array:
    """Returns G_t/G_i for i <= t, else 0, [..., L, L]; G: running product of [..., L, 1] decays."""
    length = decays.shape[-2]
    below, up_to = _below(length)
    return mx.where(up_to, mx.cumprod(mx.where(below, decays, 1), axis=-2), 0)


def _products(stack: _Stack, vectors: mx.array, keys: mx.array, decays: mx.array) -> mx.array:
    """Returns k_i . (G_t/G_i) x_t for i <= t, else 0, [n, HK, G, M, L].

    vectors: x, [n, HK, 1, M, DK]. keys: [n, HK, 1, L, DK]. decays: [n, HK, G, L, 1 or DK].
    """
    if decays.shape[-1] == 1:
        return (vectors @ keys.swapaxes(-1, -2)) * stack.of(_ratios(decays))
    # A pair's ratio is a product up to a boundary, times one from there on; the boundary belongs to
    # the widest power of two that separates the pair.
    own, levels = _stacked_masks(stack)
    products = (vectors * stack.of(keys)).sum(-1, keepdims=True) * own
    for size, pairs in levels:
        from_start, to_stop = _from_boundary(decays, size)
        part = (vectors * stack.of(from_start)) @ (keys * to_stop).swapaxes(-1, -2)
        products = products + part * pairs
    return products


def _from_boundary(decays: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Returns each row's products of decays in its run of `size` rows: up to it, and after."""
    # The first product includes each decay itself, the second one does not.
    *heads, length, width = decays.shape
    if size == 1:
        return decays, mx.ones_like(decays)
    missing = -length % size
    if missing:
        decays = mx.pad(decays, [(0, 0)] * len(heads) + [(0, missing), (0, 0)], constant_values=1)
    runs = decays.reshape(*heads, -1, size, width)
    from_start = mx.cumprod(runs, axis=-2).reshape(decays.shape)
    to_stop = mx.cumprod(runs, axis=-2, reverse=True, inclusive=False).reshape(decays.shape)
    return from_start[..., :length, :], to_stop[..., :length, :]


def _solve(lower: mx.array, right: mx.array) -> mx.array:
    """Returns (I + L)^-1 R for [..., L, DV] R, with L the part of `lower` below its diagonal."""
    # The inverse of [[A, 0], [B, D]] is [[A^-1, 0], [-D^-1 B A^-1, D^-1]], from each block size to
    # the next: its entries stay as small as the result's, while powers of L would not.
    length = lower.shape[-1]
    levels = [lower * pairs for pairs in _levels(length)]
    inverse = _eye(length) - levels[0]
    for part in levels[1:]:
        inverse = inverse - inverse @ (part @ inverse)
    return inverse @ right


@cache
def _eye(length: int) -> mx.array:
    return mx.array(np.eye(length, dtype=np.float32))


@cache
def _below(length: int) -> tuple[mx.array, mx.array]:
    """Returns [L, L] masks for i < t, and i <= t."""
    return mx.array(np.tri(length, k=-1) > 0), mx.array(np.tri(length) > 0)


@cache
def _levels(length: int) -> tuple[mx.array, ...]:
    """Returns the [L, L] float32 masks of `_boundaries`."""
    return tuple(mx.array(pairs_np) for _, pairs_np in _boundaries(length))


@cache
def _stacked_masks(stack: _Stack) -> tuple[mx.array, tuple[tuple[int, mx.array], ...]]:
    """Returns float32 masks by vector, [M, L]: where t = i, and those of `_boundaries`."""
    boundaries = _boundaries(stack.length)
    return mx.array(stack.of_np(np.eye(stack.length, dtype=np.float32))), tuple(
        (size, mx.array(stack.of_np(pairs_np))) for size, pairs_np in boundaries
    )


def _boundaries(length: int) -> list[tuple[int, np.ndarray]]:
    """Returns run sizes 2^k, each with a [L, L] mask of pairs i < t in two runs that merge next."""
    run, boundaries, size = np.arange(length), [], 1
    while size < length:
        pairs_np = (run[:, None] % 2 == 1) & (run[None] == run[:, None] - 1)
        boundaries.append((size, pairs_np.astype(np.float32)))
        run, size = run // 2, size * 2
    return boundaries
