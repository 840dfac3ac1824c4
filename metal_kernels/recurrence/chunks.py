# SPDX-License-Identifier: Apache-2.0
"""Decides how a state goes through a chunk of rows at once, or through each row where that is quicker.

With G_t the product of the decays up to row t, a chunk's updates and outputs are (the chunkwise form
of Yang et al. 2024, arXiv:2412.06464, and of Dao and Gu 2024, arXiv:2405.21060)

    u_t = r_t (v_t - S (G_t k_t) - sum_{i<t} u_i (k_i . (G_t/G_i) k_t))      by the delta rule
    u_t = r_t v_t                                                           without it
    y_t = S (G_t q_t) + sum_{i<=t} u_i (k_i . (G_t/G_i) q_t)
    S_m = G_m S + sum_{i<=m} u_i (k_i G_m/G_i)^T

Ratios of decays are products of the decays between, which are exact for a decay of 0, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from metal_kernels.sequence_groups import Endings


@dataclass(frozen=True)
class Rows:
    """L rows of n sequences, float32; HV = HK * G heads."""

    queries: mx.array  # [n, HK, 1, L, DK]
    keys: mx.array  # [n, HK, 1, L, DK]
    values: mx.array  # [n, HK, G, L, DV]
    rates: mx.array  # [n, HK, G, L, 1], 0 of rows that change nothing
    decays: mx.array | None  # [n, HK, G, L, 1 or DK], 1 of rows that change nothing

    def part(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        if start == 0 and stop == self.keys.shape[-2]:
            return self
        part = (..., slice(start, stop), slice(None))
        decays = None if self.decays is None else self.decays[part]
        return Rows(
            self.queries[part], self.keys[part], self.values[part], self.rates[part], decays
        )


@dataclass(frozen=True)
class ChunkStates:
    """States within a chunk that was gone through at once."""

    before: mx.array  # [n, HK, G, DV, DK]
    keys: mx.array  # [n, HK, 1, L, DK]
    decays: mx.array  # [n, HK, G, L, 1 or DK]
    updates: mx.array  # [n, HK, G, L, DV], u

    def after(self, endings: Endings | None) -> mx.array:
        """[E, HK, G, DV, DK] states at the endings; None: of each sequence after all rows."""
        before, keys, decays, updates = self.before, self.keys, self.decays, self.updates
        if endings is not None and endings.sequences is not None:
            before, keys, decays, updates = (
                mx.take(array, endings.sequences, axis=0)
                for array in (before, keys, decays, updates)
            )
        if endings is not None and endings.applied is not None:
            applied = endings.applied[:, None, None, :, None]
            decays, updates = mx.where(applied, decays, 1), mx.where(applied, updates, 0)
        total = decays
        if updates.shape[-2] > 1:
            following = mx.cumprod(decays, axis=-2, reverse=True, inclusive=False)
            total = following[..., :1, :] * decays[..., :1, :]
            if decays.shape[-1] == 1:
                updates = updates * following
            else:
                keys = keys * following
        return before * total + updates.swapaxes(-1, -2) @ keys


def through_chunk(rows: Rows, state: mx.array, delta: bool) -> tuple[mx.array, ChunkStates]:
    """Takes states through a chunk by matrix products.

    Args:
        rows: with decays.
        state: [n, HK, G, DV, DK] float32.
        delta: whether by the delta rule.

    Returns:
        [n, HK, G, L, DV] outputs, and the states.
    """
    assert rows.decays is not None
    decays, length = rows.decays, rows.keys.shape[-2]
    of_keys = rows.decays.shape[-1] > 1
    passed = decays if length == 1 else mx.cumprod(decays, axis=-2)  # G

    def seen(vectors: mx.array) -> mx.array:
        """[n, HK, G, L, DV], S (G_t x_t)."""
        if of_keys:
            return (vectors * passed) @ state.swapaxes(-1, -2)
        return (vectors @ state.swapaxes(-1, -2)) * passed

    between = None if of_keys or length == 1 else _ratios(decays)
    updates = rows.values
    if delta:
        updates = updates - seen(rows.keys)
    updates = updates * rows.rates
    if delta and length > 1:
        products = _products(rows.keys, rows.keys, decays, between)
        updates = _solve(products * rows.rates, updates)
    products = _products(rows.queries, rows.keys, decays, between)
    within = products * updates if length == 1 else products @ updates
    return seen(rows.queries) + within, ChunkStates(state, rows.keys, decays, updates)


@dataclass(frozen=True)
class RowStates:
    """States within a chunk that was gone through row by row: before it, and after each row."""

    states: tuple[mx.array, ...]  # L + 1 of [n, HK, G, DV, DK]

    def after(self, endings: Endings | None) -> mx.array:
        """[E, HK, G, DV, DK] states at the endings; None: of each sequence after all rows."""
        last = self.states[-1]
        if endings is None:
            return last
        if endings.applied is None:
            return last if endings.sequences is None else mx.take(last, endings.sequences, axis=0)
        sequences = endings.sequences
        if sequences is None:
            sequences = mx.arange(len(last), dtype=mx.int32)
        number = endings.applied.astype(mx.int32).sum(-1)
        return mx.take(mx.concatenate(self.states), number * len(last) + sequences, axis=0)


def through_rows(rows: Rows, state: mx.array, log_rates: mx.array) -> tuple[mx.array, RowStates]:
    """Takes states through a chunk row by row, without the delta rule.

    Quicker than a chunk at once where each head has keys of its own decays and one value.

    Args:
        rows: whose decays are exp(rate * log_rates).
        state: [n, HK, G, DV, DK] float32.
        log_rates: [HK, G, 1, DK].

    Returns:
        [n, HK, G, L, DV] outputs, and the states.
    """
    flat = (*state.shape[:2], -1, state.shape[-1])
    inputs = (rows.values * rows.rates)[..., None]  # [n, HK, G, L, DV, 1]
    states, outputs = [state], []
    for at in range(rows.keys.shape[-2]):
        decays = mx.exp(rows.rates[..., at, :, None] * log_rates)
        states.append(states[-1] * decays + inputs[..., at, :, :] * rows.keys[..., at, None, :])
        output = states[-1].reshape(flat) @ rows.queries[:, :, 0, at, :, None]
        outputs.append(output.reshape(state.shape[:-1]))
    outputs_of_all = outputs[0][..., None, :] if len(outputs) == 1 else mx.stack(outputs, axis=-2)
    return outputs_of_all, RowStates(tuple(states))


def _ratios(decays: mx.array) -> mx.array:
    """[..., L, L], G_t/G_i for i <= t, else 0, of decays [..., L, 1]."""
    length = decays.shape[-2]
    below, up_to = _below(length)
    return mx.where(up_to, mx.cumprod(mx.where(below, decays, 1), axis=-2), 0)


def _products(
    vectors: mx.array, keys: mx.array, decays: mx.array, between: mx.array | None
) -> mx.array:
    """[n, HK, G, L, L], k_i . (G_t/G_i) x_t for i <= t, else 0.

    Args:
        vectors: [n, HK, 1, L, DK], x.
        keys: [n, HK, 1, L, DK].
        decays: [n, HK, G, L, 1 or DK].
        between: `_ratios` of a head's decays; None: each key has decays, or there is one row.
    """
    length = keys.shape[-2]
    if length == 1:
        return (vectors * keys).sum(-1, keepdims=True)
    if between is not None:
        return (vectors @ keys.swapaxes(-1, -2)) * between
    # A pair's ratio is a product up to a boundary between the two times one from there on; the
    # boundary is that of the widest power of two that parts them.
    products = (vectors * keys).sum(-1, keepdims=True) * mx.array(np.eye(length, dtype=np.float32))
    for size, pairs in _levels(length):
        from_start, to_stop = _from_boundary(decays, size)
        products = products + mx.where(
            pairs, (vectors * from_start) @ (keys * to_stop).swapaxes(-1, -2), 0
        )
    return products


def _from_boundary(decays: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Products of decays from the start of each one's run of a size, itself included, and to its
    stop, itself excluded."""
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
    """(I + L)^-1 R, of which L is the part of `lower` below its diagonal.

    The inverse of twice the size is [[A^-1, 0], [-D^-1 B A^-1, D^-1]] of [[A, 0], [B, D]]: its entries
    stay as small as the answer's, where powers of L would not.

    Args:
        lower: [..., L, L].
        right: [..., L, DV].
    """
    inverse = None
    for _, pairs in _levels(lower.shape[-1]):
        part = mx.where(pairs, lower, 0)
        if inverse is None:
            inverse = mx.array(np.eye(lower.shape[-1], dtype=np.float32)) - part
        else:
            inverse = inverse - inverse @ (part @ inverse)
    return inverse @ right


@cache
def _below(length: int) -> tuple[mx.array, mx.array]:
    """[L, L] bool each: i < t, and i <= t."""
    return mx.array(np.tri(length, k=-1) > 0), mx.array(np.tri(length) > 0)


@cache
def _levels(length: int) -> tuple[tuple[int, mx.array], ...]:
    """Powers of two, and [L, L] bool whether such a run's boundary is the widest between i and t > i."""
    at = np.arange(length)
    levels, size = [], 1
    while size < length:
        run = at // size
        pairs = (run[:, None] % 2 == 1) & (run[None] == run[:, None] - 1)
        levels.append((size, mx.array(pairs)))
        size *= 2
    return tuple(levels)
