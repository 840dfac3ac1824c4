# SPDX-License-Identifier: Apache-2.0
"""Attention to the newest positions and to compressed entries, in MLX's operations.

In DeepSeek V4 and V4.1, a softmax has both: the keys of a window of positions, and entries that
stand for groups of positions, all that a token sees or those with the highest scores of an indexer.
Keys and entries are values, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from metal_kernels.paged_attention.fused import even_cuts
from vllm_metal.engine.attention import sparse
from vllm_metal.engine.kv_cache.compressed_rows import Call, CompressedPlan, CompressedRows
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import joined
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT
from vllm_metal.patches.mlx_patches.seam import Compression, EntryBlocks, Scoring


@dataclass(frozen=True)
class Stored:
    """Rows of one layer in the pool, after the write of this step's."""

    kv_cache: LayerKVCache
    plan: object
    width: int  # elements of a row; those stored are padded to whole units

    @property
    def reads(self) -> CompressedRows:
        found = cast(CompressedPlan, self.plan).compressed
        assert found is not None
        return found

    def rows_at(self, read_slots: mx.array, num_slots: int = 1) -> mx.array:
        """Returns [n, k / num_slots, width] rows at [n, k] slots, `num_slots` slots each."""
        heads = len(self.kv_cache.keys.elements)
        shape = len(read_slots), heads, read_slots.shape[1]
        read_slots = mx.broadcast_to(read_slots[:, None], shape)
        rows, _ = self.kv_cache.rows_at(self.plan, read_slots)
        rows = rows.swapaxes(1, 2).reshape(len(read_slots), shape[2] // num_slots, -1)
        return rows[..., : self.width]


@dataclass(frozen=True)
class Chosen:
    """What an indexer has chosen, for each call of the plan."""

    #: [n, Q, topk] int32, numbers of entries in order, ABSENT behind the last; None: all, as no
    #: context has more.
    numbers: Sequence[mx.array | None]
    #: The same of blocks of entries, for later indexers.
    blocks: Sequence[mx.array | None] = ()


def in_units(rows: mx.array, heads: int, unit: int) -> mx.array:
    """Returns [N, D] rows as [N, heads, unit], as the pool stores them, padded with zeros."""
    missing = heads * unit - rows.shape[-1]
    return mx.pad(rows, [(0, 0), (0, missing)]).reshape(len(rows), heads, unit)


def choose(
    entries: Stored,
    queries: mx.array,
    weights: mx.array,
    positions: mx.array,
    by: Compression,
    among: Chosen | None = None,
) -> Chosen:
    """Chooses the entries that each token attends to, by sum_h w_h * relu(q_h . entry).

    Reads each context's entries once for each call. If scores are equal, the first are chosen.

    Args:
        queries: [T, H, D].
        weights: [T, H], scales included.
        positions: [T] int32.
        among: an earlier choice, whose blocks have all entries that can be chosen.
    """
    assert by.topk is not None
    numbers: list[mx.array | None] = []
    blocks: list[mx.array | None] = []
    slots = by.slots_of(entries.width)
    for index, call in enumerate(entries.reads.calls):
        if call.read_slots.shape[1] // slots <= by.topk:
            numbers.append(None)
            blocks.append(None)
            continue
        keys = entries.rows_at(call.read_slots, slots).astype(mx.float32).swapaxes(-1, -2)
        given = [_of_call(call, each) for each in (positions, queries, weights)]
        if among is not None and (limit := among.blocks[index]) is not None:
            given.append(limit)
        most = sparse.MAX_SCORES // (len(keys) * keys.shape[-1] * queries.shape[1])
        parts: list[mx.array] = []
        for_later: list[mx.array] = []
        for ours, rows, shares, *limits in _cut(given, most, parts):
            products = rows.astype(mx.float32).flatten(1, 2) @ keys
            products = mx.maximum(mx.unflatten(products, 1, rows.shape[1:3]), 0)
            total = (shares.astype(mx.float32)[:, :, None] @ products)[:, :, 0]
            seen = _seen(total.shape[-1], ours, by)
            if limits and by.blocks is not None:
                seen &= in_blocks(limits[0], total.shape[-1], by.blocks)
            total = mx.where(seen, total, -mx.inf)
            parts.append(sparse.largest(total, by.topk))
            if among is None and by.blocks is not None:
                for_later += _best_blocks(total, ours, by.blocks, by)
        numbers.append(joined(parts, axis=1))
        blocks.append(joined(for_later, axis=1) if for_later else None)
    return Chosen(numbers, blocks)


def _best_blocks(
    scores: mx.array, positions: mx.array, blocks: EntryBlocks, by: Compression
) -> list[mx.array]:
    """Chooses blocks by [n, Q, E] scores of entries; returns [n, Q, topk] numbers, or none if no
    context has more."""
    missing = -scores.shape[-1] % blocks.size
    padded = mx.pad(scores, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
    best = mx.unflatten(padded, -1, (-1, blocks.size)).max(axis=-1)
    if best.shape[-1] <= blocks.topk:
        return []
    newest = ((positions + 1) // by.size - 1) // blocks.size
    best = mx.where(mx.arange(best.shape[-1]) == newest[..., None], mx.inf, best)
    return [sparse.largest(best, blocks.topk)]


def in_blocks(numbers: mx.array, count: int, blocks: EntryBlocks) -> mx.array:
    """Returns [n, Q, count] bool, the entries of blocks with [n, Q, k] numbers."""
    num_blocks = -(-count // blocks.size)
    target = mx.where(numbers == ABSENT, num_blocks, numbers)  # one past the last: dropped
    flags = mx.zeros((*numbers.shape[:-1], num_blocks + 1), mx.bool_)
    flags = mx.put_along_axis(flags, target, mx.array(True), axis=-1)[..., :num_blocks]
    return mx.repeat(flags, blocks.size, axis=-1)[..., :count]


def attend(
    keys: Stored,
    queries: mx.array,
    positions: mx.array,
    by: Compression,
    scoring: Scoring,
    entries: Stored | None = None,
    chosen: Chosen | None = None,
) -> mx.array:
    """Attends with [T, H, D] queries at [T] positions; returns [T, H, D].

    Args:
        keys, entries: see the module's docstring; without entries there is a window alone.
        scoring: scale and sinks.
        chosen: from `choose`; None: all entries.
    """
    outputs: list[mx.array] = []
    for index, call in enumerate(keys.reads.calls):
        given = [_of_call(call, each) for each in (positions, queries * scoring.scale)]
        newest = keys.rows_at(call.read_slots).astype(queries.dtype)
        of_entries = None if entries is None else entries.reads.calls[index].read_slots
        numbers = None if chosen is None else chosen.numbers[index]
        rows = None
        if entries is not None and numbers is None:
            assert of_entries is not None
            slots = by.slots_of(entries.width)
            rows = entries.rows_at(of_entries, slots).astype(queries.dtype)
        if numbers is not None:
            given.append(numbers)
        count = newest.shape[1] + (0 if rows is None else rows.shape[1])
        most = rows_per_call(len(newest), count, by, queries)
        parts: list[mx.array] = []
        first = given[0][:, :1]  # before cuts
        for ours, some, *of_these in _cut(given, most, parts):
            scores = [_masked(_products(some, newest), _near(newest.shape[1], first, ours, by))]
            values = [newest]
            if rows is not None:
                scores.append(_masked(_products(some, rows), _seen(rows.shape[1], ours, by)))
                values.append(rows)
            elif of_these and entries is not None:
                assert of_entries is not None
                picked = _picked(entries, of_entries, of_these[0], by).astype(queries.dtype)
                scores.append(_masked(some @ picked.swapaxes(-1, -2), of_these[0] != ABSENT))
                values.append(picked)
            parts.append(_mixed(scores, values, scoring.sinks))
        outputs.append(joined(parts, axis=1).flatten(0, 1))
    out, order = joined(outputs), keys.reads.order
    return out if order is None else out[order]


def rows_per_call(num_pieces: int, count: int, by: Compression, queries: mx.array) -> int:
    """Returns the number of tokens of each of n pieces that attend in one call.

    count: newest positions and entries that all tokens of a piece have in common.
    """
    _, num_heads, size = queries.shape
    chosen = by.topk or 0
    # Scores, masked, their weights, and both parts of them; chosen rows, their units and copies.
    row = 4 * (count + chosen) * num_heads * mx.float32.size
    row += 4 * chosen * size * queries.dtype.size
    return max(sparse.MAX_BYTES // (row * num_pieces), 1)


def _of_call(call: Call, values: mx.array) -> mx.array:
    """Returns [n, Q, ...] rows of a call's tokens of [T, ...] values."""
    return values[call.rows].reshape(call.num_pieces, call.num_tokens, *values.shape[1:])


def _cut(
    given: Sequence[mx.array], most: int, before: Sequence[mx.array]
) -> Iterator[list[mx.array]]:
    """Yields parts of [n, Q, ...] arrays of at most `most` tokens, each to run after the last of
    `before`, whose scores are freed then."""
    for first, count in even_cuts(given[0].shape[1], max(most, 1)):
        parts = [each[:, first : first + count] for each in given]
        if before:
            parts = mx.depends(parts, [before[-1]])
        yield parts


def _seen(count: int, positions: mx.array, by: Compression) -> mx.array:
    """Returns [n, Q, count] bool, the entries whose groups end at [n, Q] positions or before."""
    return mx.arange(count) < ((positions + 1) // by.size)[..., None]


def _near(count: int, first: mx.array, positions: mx.array, by: Compression) -> mx.array:
    """Returns [n, Q, count] bool, the keys in the window of [n, Q] positions.

    first: [n, 1], position of each piece's first token, the last one of the first window.
    """
    of_keys = (first - (by.window - 1) + mx.arange(count))[:, None]
    own = positions[..., None]
    return (of_keys >= 0) & (of_keys <= own) & (of_keys > own - by.window)


def _products(queries: mx.array, rows: mx.array) -> mx.array:
    """Returns [n, Q, H, k] of [n, Q, H, D] queries and [n, k, D] rows."""
    return mx.unflatten(queries.flatten(1, 2) @ rows.swapaxes(-1, -2), 1, queries.shape[1:3])


def _masked(scores: mx.array, seen: mx.array) -> mx.array:
    return mx.where(seen[:, :, None], scores, mx.array(-mx.inf, scores.dtype))


def _picked(entries: Stored, read_slots: mx.array, numbers: mx.array, by: Compression) -> mx.array:
    """Reads the [n, q, k] chosen entries, absent ones as zeros; returns [n, q, k, D]."""
    slots = by.slots_of(entries.width)
    units = mx.maximum(numbers, 0)[..., None] * slots + mx.arange(slots, dtype=mx.int32)
    found = mx.take_along_axis(read_slots, units.reshape(len(read_slots), -1), axis=1)
    found = mx.where((numbers != ABSENT)[..., None], found.reshape(units.shape), ABSENT)
    rows = entries.rows_at(found.reshape(len(read_slots), -1), slots)
    return rows.reshape(*numbers.shape, -1)


def _mixed(
    scores: Sequence[mx.array], values: Sequence[mx.array], sinks: mx.array | None
) -> mx.array:
    """Returns [n, q, H, D]: one softmax of [n, q, H, k] scores, and [n, k, D] or [n, q, k, D]
    values."""
    ends = [sum(each.shape[-1] for each in scores[: i + 1]) for i in range(len(scores))]
    columns = list(scores)
    if sinks is not None:
        shape = (*scores[0].shape[:-1], 1)
        columns.append(mx.broadcast_to(sinks.astype(scores[0].dtype)[:, None], shape))
    shares = mx.softmax(joined(columns, axis=-1), axis=-1, precise=True)
    mixed = []
    for part, rows in zip(mx.split(shares, ends, axis=-1), values, strict=False):
        mixed.append(part @ rows if rows.ndim == 4 else _products(part, rows.swapaxes(-1, -2)))
    return sum(mixed[1:], mixed[0])
