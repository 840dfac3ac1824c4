# SPDX-License-Identifier: Apache-2.0
"""Paged attention in MLX's operations: plan() once a step, run() once a layer.

It serves the CPU device and layers that the kernels do not, and the self-check compares the kernels
with it on the user's machine. Requests of like shape form a *bucket*: one indexed read gathers the
bucket's context from the pool, this step's K/V are laid over it, and one batched attention call
serves all of the bucket's rows. Python work per layer is O(buckets), never O(requests).
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.kv_gather.reference import decode
from metal_kernels.pace import Pace

_LOG2_E = math.log2(math.e)

#: The most scores of a head, and the most gathered slots, of one attention call: a step's memory
#: does not grow with the context. A request that needs more gets calls of its own, of MIN_ROWS rows
#: or more each; every call gathers the context anew, which costs as much as a few rows.
MAX_SCORES = 2**20
MAX_GATHERED = 2**15
MIN_ROWS = 64


@dataclass(frozen=True)
class Bucket:
    """Requests whose padded shapes agree: n of them, Q query rows and S context slots each."""

    num_requests: int  # n
    query_len: int  # Q, the longest in the bucket
    context_len: int  # S, whole blocks
    block_table: mx.array  # [n, S / block_size] int32, pool block of each context block
    rows: mx.array | None  # [n * Q] int32, batch row of each padded query; None: rows as they are
    fresh: mx.array  # [f] int32, places in the flat [n * S] context that this step writes
    sources: mx.array | None  # [f] int32, batch row whose K/V go there; None: all rows, in order
    mask: mx.array  # [n, 1, Q, S] bool, True where a query may look

    def work(self, num_heads: int, sizes: int) -> int:
        """FLOPs; `sizes` is that of a key and of a value together."""
        return 2 * self.num_requests * self.query_len * self.context_len * num_heads * sizes


@dataclass(frozen=True)
class BucketPlan:
    """How one step's rows attend, for all layers that share a block table and a window."""

    num_tokens: int  # T
    buckets: tuple[Bucket, ...]
    order: mx.array | None  # [T] int32, place of row t in the concatenated padded outputs


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: np.ndarray,
    block_size: int,
    window: int | None = None,
) -> BucketPlan:
    """Groups R requests into buckets of like shape.

    A bucket holds requests whose query and context lengths round up to the same power of two, so
    padding at most doubles either, and a step has few buckets whatever its number of requests.

    Args:
        query_start_loc: [R + 1] int32, first batch row of each request.
        seq_lens: [R] int32, context of each request including this step's rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        slot_mapping: [T] int32, pool slot each row's K/V go to. A request may read blocks that
            another one writes in this same step (a prefix hit on a prompt just scheduled).
        block_size: tokens of a block.
        window: a query at position p sees positions (p - window, p]; None sees [0, p].
    """
    pieces = _in_pieces(query_start_loc, seq_lens, block_tables, window)
    query_start_loc, seq_lens, block_tables = pieces
    query_lens = np.diff(query_start_loc)
    first_block = np.zeros_like(seq_lens)
    if window is not None:
        first_block = np.maximum(seq_lens - query_lens - window + 1, 0) // block_size
    num_blocks = -(-seq_lens // block_size) - first_block
    num_tokens = int(query_start_loc[-1])
    writes = _Writes(slot_mapping, block_size)
    buckets, order, base = [], np.empty(num_tokens, np.int32), 0
    shapes = _log2_ceil(query_lens) * 64 + _log2_ceil(num_blocks)  # 2**64 blocks are enough
    for members in _alike(shapes, query_lens, num_blocks * block_size):
        table = _padded_table(block_tables[members], first_block[members], num_blocks[members])
        queries = _padded_queries(query_start_loc[members], query_lens[members])
        first_query = (seq_lens - query_lens - first_block * block_size)[members]
        bucket = _bucket(table, queries, first_query, writes, block_size, window)
        order[queries.rows[queries.real]] = base + np.flatnonzero(queries.real)
        base += queries.rows.size
        buckets.append(bucket)
    natural = base == num_tokens and _is_range(order, num_tokens)
    return BucketPlan(num_tokens, tuple(buckets), None if natural else mx.array(order))


@dataclass(frozen=True)
class _Queries:
    """A bucket's query rows, padded to the longest."""

    rows: np.ndarray  # [n, Q] int32, batch row; padding repeats the first
    real: np.ndarray  # [n, Q] bool, False for padding


class _Writes:
    """Which batch row writes a pool slot in this step, if any."""

    def __init__(self, slot_mapping: np.ndarray, block_size: int) -> None:
        self._rows = np.argsort(slot_mapping).astype(np.int32)
        self._slots = slot_mapping[self._rows]
        self._blocks = np.unique(slot_mapping // block_size)
        self._offsets = np.arange(block_size)

    def __len__(self) -> int:
        return len(self._rows)

    def into(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places in the flat context of a [n, W] block table, and the rows that write there."""
        touched = np.flatnonzero(np.isin(table, self._blocks))
        slots = (table.ravel()[touched, None] * len(self._offsets) + self._offsets).ravel()
        places = (touched[:, None] * len(self._offsets) + self._offsets).ravel()
        nearest = np.minimum(np.searchsorted(self._slots, slots), len(self._slots) - 1)
        written = self._slots[nearest] == slots
        return places[written].astype(np.int32), self._rows[nearest[written]]


def _in_pieces(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, block_tables: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts a request whose rows would have more than MAX_SCORES into several."""
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    context = seq_lens if window is None else np.minimum(seq_lens, window + ends - starts)
    rows = np.maximum(MAX_SCORES // context, MIN_ROWS)
    counts = -(-(ends - starts) // rows)
    if (counts == 1).all():
        return query_start_loc, seq_lens, block_tables
    request = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = starts[request] + number * rows[request]
    behind = np.maximum(ends[request] - starts - rows[request], 0)  # rows of later pieces
    return np.append(starts, ends[-1]), seq_lens[request] - behind, block_tables[request]


def _alike(shapes: np.ndarray, query_lens: np.ndarray, context: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of requests of like shape, in groups that one call may hold when padded alike."""
    for shape in np.unique(shapes):
        members = np.flatnonzero(shapes == shape)
        q, s = int(query_lens[members].max()), int(context[members].max())
        most = max(1, min(MAX_SCORES // (q * s), MAX_GATHERED // s))
        yield from np.split(members, range(most, len(members), most))


def _log2_ceil(lengths: np.ndarray) -> np.ndarray:
    """Smallest k with 2**k >= length, elementwise; lengths are at least 1."""
    return np.ceil(np.log2(lengths)).astype(np.int64)


def _is_range(values: np.ndarray, count: int) -> bool:
    return len(values) == count and bool((values == np.arange(count)).all())


def _padded_table(tables: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[n, W] int32: each request's blocks from `first` on, the last repeated up to the widest."""
    columns = np.minimum(np.arange(int(count.max())), (count - 1)[:, None])
    return np.take_along_axis(tables, first[:, None] + columns, axis=1).astype(np.int32)


def _padded_queries(starts: np.ndarray, query_lens: np.ndarray) -> _Queries:
    offsets = np.arange(int(query_lens.max()), dtype=np.int32)
    real = offsets < query_lens[:, None]
    return _Queries(rows=np.where(real, starts[:, None] + offsets, starts[:, None]), real=real)


def _bucket(
    table: np.ndarray,
    queries: _Queries,
    first_query: np.ndarray,
    writes: _Writes,
    block_size: int,
    window: int | None,
) -> Bucket:
    """Args beyond the plan's: first_query, [n] int32, context slot of each request's first row."""
    (n, q), num_tokens = queries.rows.shape, len(writes)
    s = table.shape[1] * block_size
    query_slots = (first_query[:, None] + np.arange(q))[:, :, None]  # [n, Q, 1]
    slots = np.arange(s)
    mask = slots <= query_slots
    if window is not None:
        mask &= slots > query_slots - window
    fresh, sources = writes.into(table)
    rows = queries.rows.ravel()
    return Bucket(
        num_requests=n,
        query_len=q,
        context_len=s,
        block_table=mx.array(table),
        rows=None if _is_range(rows, num_tokens) else mx.array(rows.astype(np.int32)),
        fresh=mx.array(fresh),
        sources=None if _is_range(sources, num_tokens) else mx.array(sources),
        mask=mx.array(mask[:, None]),
    )


def run(
    plan: BucketPlan,
    queries: mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    key_pool: mx.array,
    value_pool: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    fused: bool | None = None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    pace: Pace | None = None,
) -> mx.array:
    """Attention of one layer.

    Args:
        plan: of this step, for this layer's block table and window.
        queries: [T, H, D].
        keys: [T, Hkv, D], of this step; None: the pool holds them already.
        values: [T, Hkv, DV], likewise.
        key_pool: [Hkv, B, block_size, D], of the dtype of `queries`, uint8 (fp8 e4m3) or int8.
        value_pool: [Hkv, B, block_size, DV], likewise.
        scale: factor on the scores.
        sinks: [H], a learned logit per head that takes part in the softmax only.
        softcap: scores become softcap * tanh(score / softcap).
        fused: whether by MLX's fused attention, which has no soft cap, or by plain operations;
            None: whichever is faster on this device.
        key_scales: [Hkv, B, block_size] bfloat16, of a pool of codes.
        value_scales: likewise.
        pace: ends command buffers between calls that take long; None: MLX alone ends them.

    Returns:
        [T, H, DV], the dtype of `queries`.
    """
    if fused is None:
        fused = mx.default_device().type == mx.DeviceType.gpu
    if fused and softcap is None:
        attend = _attend_fused
    else:
        attend = functools.partial(_attend_grouped, softcap=softcap)
    outputs: list[mx.array] = []
    num_heads, sizes = queries.shape[1], queries.shape[2] + value_pool.shape[3]
    for bucket in plan.buckets:
        if pace is not None:
            pace.before(bucket.work(num_heads, sizes), *outputs[::-1])
        picked = queries if bucket.rows is None else queries[bucket.rows]
        picked = picked.reshape(bucket.num_requests, bucket.query_len, *queries.shape[1:])
        k = _context(bucket, keys, key_pool, key_scales, queries.dtype)
        v = _context(bucket, values, value_pool, value_scales, queries.dtype)
        out = attend(picked, k, v, bucket.mask, scale, sinks)
        outputs.append(out.reshape(-1, *out.shape[2:]))
    merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return merged if plan.order is None else merged[plan.order]


def _context(
    bucket: Bucket,
    fresh: mx.array | None,
    pool: mx.array,
    scales: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array:
    """The bucket's padded K or V, [Hkv, n, S, D], with this step's rows laid over the pool's.

    Head outermost, so that what is gathered is already laid out for the matrix products.
    """
    num_heads, num_blocks, block_size, head_size = pool.shape
    heads = mx.arange(num_heads, dtype=mx.int32)
    blocks = bucket.block_table + (heads * num_blocks)[:, None, None]
    context = pool.reshape(num_heads * num_blocks, block_size * head_size)[blocks]
    size = bucket.num_requests * bucket.context_len
    context = context.reshape(num_heads * size, head_size)
    if scales is not None:
        factors = scales.reshape(num_heads * num_blocks, block_size)[blocks]
        context = decode(context, factors.reshape(num_heads * size)).astype(dtype)
    if fresh is not None:
        rows = fresh if bucket.sources is None else fresh[bucket.sources]
        context[bucket.fresh + (heads * size)[:, None]] = rows.swapaxes(0, 1)
    return context.reshape(num_heads, bucket.num_requests, bucket.context_len, head_size)


def _attend_fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """[n, Q, H, D] queries over [Hkv, n, S, D] keys and values; same shape back."""
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(1, 2),
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out.swapaxes(1, 2)


def _attend_grouped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """_attend_fused by plain operations: all query heads of a K/V head in one matrix product.

    On MLX's CPU backend four to eight times faster than the fused call: that one repeats K and V
    for every query head, and takes exp at 19 ns an element where a power of two takes 6.
    """
    (n, q, num_heads, d), num_kv_heads = queries.shape, keys.shape[0]
    group = num_heads // num_kv_heads
    factor = scale * _LOG2_E if softcap is None else scale / softcap
    scaled = queries.astype(mx.float32) * factor
    packed = scaled.reshape(n, q, num_kv_heads, group, d).transpose(2, 0, 3, 1, 4)
    scores = packed.reshape(num_kv_heads, n, group * q, d) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(num_kv_heads, n, group, q, -1)
    if softcap is not None:
        scores = mx.tanh(scores) * (softcap * _LOG2_E)
    scores = mx.where(mask, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    rest = None
    if sinks is not None:
        rest = sinks.astype(mx.float32).reshape(num_kv_heads, 1, group, 1, 1) * _LOG2_E
        top = mx.maximum(top, rest)
    weights = mx.power(2.0, scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if rest is not None:
        total = total + mx.power(2.0, rest - top)
    out = weights.reshape(num_kv_heads, n, group * q, -1) @ values
    out = out.reshape(num_kv_heads, n, group, q, -1) / total
    return out.transpose(1, 3, 0, 2, 4).reshape(n, q, num_heads, -1).astype(queries.dtype)
