# SPDX-License-Identifier: Apache-2.0
"""Groups a step's requests into buckets that MLX's operations attend to together.

A *bucket* holds requests of similar shape, or a shared prefix of requests with all their rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention.common_prefix import common_prefixes
from metal_kernels.paged_attention.padded_rows import PaddedQueries, PaddedTable, StepWrites

#: Most scores of a head, and most gathered slots, of one attention call, so that a step's memory
#: does not grow with the context. Larger requests get calls of their own, of at least MIN_ROWS
#: rows; each call gathers the context again, which costs as much as a few rows.
MAX_SCORES = 2**20
MAX_GATHERED = 2**15
MIN_ROWS = 64
#: Widths of decode tables per power of two. Shapes then stay the same for many steps, and tables
#: grow by at most an eighth.
WIDTHS = 8
#: Granularity of widths, in blocks of all requests together. A new shape has to be built in Python
#: and compiled, 25 ms for 28 layers, which pays for slots padded in a few steps.
STABLE_BLOCKS = 4
DECODE_ROWS = 16  # requests with more rows are prefills, whose shapes do not recur
#: Slots that an additional call must save, be it for a shared prefix or for shorter requests. A
#: slot takes 0.4 microseconds per layer on two x86 cores (16 requests of 600 tokens), so this many
#: pay for a call's operations.
MIN_SAVED = 512

Indices = tuple[mx.array, ...]  # one index array for each of an array's first axes


@dataclass(frozen=True)
class Bucket:
    """n requests of equal padded shape, with Q query rows and S context slots each."""

    num_requests: int  # n
    query_len: int  # Q, the longest in the bucket
    context_len: int  # S, whole blocks
    block_table: mx.array  # [n, S / block_size] int32, pool block of each context block
    rows: mx.array | None  # [n * Q] int32, batch row of each padded query; None: all, in order
    fresh: mx.array  # [f] int32, positions in the flat [n * S] context that this step writes
    sources: mx.array | None  # [f] int32, batch rows of their K/V; None: all rows, in order
    mask: mx.array | None  # [n, 1, Q, S] bool, True where a query may look; None: everywhere
    #: Unpadded slots, if the rows are the last of one request and causal: MLX's fused attention
    #: then skips invisible slots. None: use the mask.
    causal_len: int | None = None
    bounds: mx.array | None = None  # [n, 2] int32, visible slots of the context
    #: [n, Q, S] int32, positions from each slot to each query, the plan's extent where there is no
    #: bias. None: no bias.
    distances: mx.array | None = None
    _positions: dict[int, tuple[Indices, Indices]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def indices(self, num_heads: int) -> tuple[Indices, Indices]:
        """Returns indices of the context's blocks in the pool, and of new rows in the context.

        Cached, so that all layers share them.

        Returns:
            Head and block in the pool, each [Hkv, n, S / block_size] int32; and, for rows of this
            step, head, request and slot in the context, each [f * Hkv] int32, heads innermost.
        """
        if num_heads not in self._positions:
            heads = mx.array(np.arange(num_heads, dtype=np.int32))
            blocks = num_heads, *self.block_table.shape
            rows = self.fresh.size, num_heads
            slots = mx.broadcast_to(self.fresh[:, None], rows).flatten()
            self._positions[num_heads] = (
                (
                    mx.broadcast_to(heads[:, None, None], blocks),
                    mx.broadcast_to(self.block_table, blocks),
                ),
                (mx.broadcast_to(heads, rows).flatten(), *mx.divmod(slots, self.context_len)),
            )
        return self._positions[num_heads]

    def work(self, num_heads: int, sizes: int) -> int:
        """Returns the FLOPs; `sizes` is the size of a key plus that of a value."""
        return 2 * self.num_requests * self.query_len * self.context_len * num_heads * sizes


@dataclass(frozen=True)
class BucketPlan:
    """Attention of a step's rows, for all layers that share a block table and a window."""

    num_tokens: int  # T
    buckets: tuple[Bucket, ...]
    order: mx.array | None  # [T] int32, position of row t in the concatenated padded outputs
    shared: tuple[Bucket, ...] = ()  # shared prefixes, each as one request
    shared_order: mx.array | None = None  # [T] int32, like `order`; one past the last: no row

    @property
    def calls(self) -> tuple[Bucket, ...]:
        """All attention calls of a layer."""
        return (*self.buckets, *self.shared)


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: np.ndarray,
    block_size: int,
    window: int | None = None,
    share: bool = False,
    causal: bool = False,
    earlier_slots: np.ndarray | None = None,
    bounded: bool = False,
    bidirectional: bool = False,
    extent: int | None = None,
) -> BucketPlan:
    """Groups R requests into buckets of similar shape.

    Args:
        query_start_loc, seq_lens, block_tables, block_size, window: see `plan.plan`.
        slot_mapping: [T] int32, pool slot of each row's K/V; -1: never read. A request may read
            blocks that another one writes in this step (a prefix hit on a prompt just scheduled).
        share: gather shared prefixes once, with plain operations; not possible with a window.
        causal: set the `causal_len` of prompts, for MLX's fused attention. It changes each step,
            unlike the padded shape.
        earlier_slots: [E] int32, pool slots of rows of previous steps that the pool does not hold
            yet, equally many per step; -1: never read. `run` then takes the K/V of these E rows,
            followed by those of the T rows of this step.
        bounded: set the buckets' `bounds`, for reads of the pool.
        bidirectional: rows of a request also see its rows of this step after them; the window still
            ends at each row's own position.
        extent: distances that have a relative bias, see `reference.run`; None: there is no bias.
    """
    # Requests share a bucket if their query and context lengths round up to the same power of two:
    # padding at most doubles either, and the number of buckets does not grow with the requests.
    # Shorter contexts join a bucket if the padding costs less than another call.
    if not bidirectional:  # whose rows are few, and see those of all pieces
        pieces = _split_requests(query_start_loc, seq_lens, block_tables, window)
        query_start_loc, seq_lens, block_tables = pieces
    query_lens = np.diff(query_start_loc)
    first_block = np.zeros_like(seq_lens)
    num_tokens = int(query_start_loc[-1])
    writes = StepWrites(slot_mapping, block_size, earlier_slots)
    shared = _Calls(num_tokens)
    if window is not None:
        first_block = np.maximum(seq_lens - query_lens - window + 1, 0) // block_size
    elif share and len(query_lens) > 1:
        whole = (seq_lens - query_lens) // block_size  # blocks visible to all rows of a request
        pieces = query_start_loc, seq_lens, block_tables
        first_block = _add_shared(shared, pieces, whole, writes, block_size, extent)
    pieces = query_start_loc, seq_lens, block_tables
    own = _own_calls(
        pieces, first_block, writes, block_size, window, causal, bounded, bidirectional, extent
    )
    return BucketPlan(
        num_tokens, tuple(own.buckets), own.order(), tuple(shared.buckets), shared.order()
    )


def contexts(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: np.ndarray,
    block_size: int,
) -> BucketPlan:
    """Groups R requests for callers that read each one's context once, for all of its rows.

    Buckets have bounds but no masks, and requests are not split. Arguments: see `plan`.
    """
    writes = StepWrites(slot_mapping, block_size)
    requests = query_start_loc, seq_lens, block_tables
    first_block = np.zeros_like(seq_lens)
    own = _own_calls(
        requests, first_block, writes, block_size, None, False, True, False, None, masked=False
    )
    return BucketPlan(int(query_start_loc[-1]), tuple(own.buckets), own.order())


class _Calls:
    """Collects buckets, and the position of each batch row in their concatenated outputs."""

    def __init__(self, num_tokens: int) -> None:
        self.buckets: list[Bucket] = []
        self._positions = np.full(num_tokens, -1, np.int32)
        self._size = 0

    def add(self, bucket: Bucket, queries: PaddedQueries) -> None:
        self._positions[queries.rows[queries.real]] = self._size + np.flatnonzero(queries.real)
        self._size += queries.rows.size
        self.buckets.append(bucket)

    def order(self) -> mx.array | None:
        """Returns each row's position in the outputs, or one past the last; None: in order."""
        if self._size == len(self._positions) and _is_range(self._positions, self._size):
            return None
        return mx.array(np.where(self._positions < 0, self._size, self._positions))


def _shared_rows(rows: np.ndarray, num_requests: int, context_len: int) -> list[np.ndarray]:
    """Splits rows into attention calls over a shared prefix; empty if sharing does not pay."""
    most = max(MAX_SCORES // context_len, MIN_ROWS)
    calls = np.split(rows, range(most, len(rows), most))
    pays = num_requests >= 2 * len(calls)  # pieces of one long prompt save nothing together
    pays &= (num_requests - len(calls)) * context_len >= MIN_SAVED * len(calls)
    return calls if pays else []


def _add_shared(
    shared: _Calls,
    pieces: tuple[np.ndarray, np.ndarray, np.ndarray],
    whole: np.ndarray,
    writes: StepWrites,
    block_size: int,
    extent: int | None,
) -> np.ndarray:
    """Adds calls over shared prefixes; returns each request's first remaining block, [R].

    `pieces`: `query_start_loc`, `seq_lens` and `block_tables`; `whole`: [R] blocks that all rows of
    a request see.
    """
    query_start_loc, seq_lens, block_tables = pieces
    query_lens = np.diff(query_start_loc)
    first_block = np.zeros_like(whole)
    requests = np.repeat(np.arange(len(query_lens)), query_lens)  # of each row
    positions = np.arange(len(requests)) + (seq_lens - query_start_loc[1:])[requests]
    group, lengths = common_prefixes(block_tables, whole)
    for number, length in enumerate(lengths.tolist()):
        members = np.flatnonzero(group == number)
        rows = np.flatnonzero(np.isin(requests, members)).astype(np.int32)
        for of_call in _shared_rows(rows, len(members), length * block_size):
            table = PaddedTable.padded(
                block_tables[members[:1]], np.zeros(1, int), [length], length
            )
            queries = PaddedQueries(of_call[None], np.ones((1, len(of_call)), bool))
            bucket = _bucket(table, queries, None, writes, block_size, len(requests))
            if extent is not None:
                bucket = _with_distances(bucket, positions[of_call][None], extent)
            shared.add(bucket, queries)
            first_block[members] = length
    return first_block


def _own_calls(
    requests: tuple[np.ndarray, np.ndarray, np.ndarray],
    first_block: np.ndarray,
    writes: StepWrites,
    block_size: int,
    window: int | None,
    causal: bool,
    bounded: bool,
    bidirectional: bool,
    extent: int | None,
    masked: bool = True,
) -> _Calls:
    """Makes the calls over each request's own blocks, which start at `first_block`, [R].

    `requests`: `query_start_loc`, `seq_lens` and `block_tables`.
    """
    query_start_loc, seq_lens, block_tables = requests
    query_lens, num_tokens = np.diff(query_start_loc), int(query_start_loc[-1])
    own = _Calls(num_tokens)
    num_blocks = -(-seq_lens // block_size) - first_block
    decodes = query_lens <= DECODE_ROWS
    widths = num_blocks
    if writes.follow:  # one more slot, invisible to all rows, see `StepWrites.in_order`
        widths = -(-(seq_lens + 1) // block_size) - first_block
    widths = np.where(decodes, _stable_widths(widths, decodes.sum()), widths)
    shapes = _log2_ceil(query_lens) * 64 + _log2_ceil(widths)  # 2**64 blocks are enough
    shapes = _merge_shapes(shapes, widths * block_size)
    for members in _similar(shapes, query_lens, widths * block_size):
        table = PaddedTable.padded(
            block_tables[members], first_block[members], num_blocks[members], widths[members].max()
        )
        queries = PaddedQueries.padded(query_start_loc[members], query_lens[members])
        first_query = (seq_lens - query_lens - first_block * block_size)[members]
        newest = first_query + query_lens[members] - 1 if bidirectional else None
        bucket = _bucket(
            *(table, queries, first_query, writes, block_size, num_tokens, window, newest), masked
        )
        alone = len(members) == 1 and not decodes[members[0]]
        if causal and not bidirectional and window is None and alone:
            bucket = replace(bucket, causal_len=int(seq_lens[members[0]]))
        if bounded:
            bounds = _bounds(first_query, query_lens[members], window)
            bucket = replace(bucket, bounds=bounds)
        if extent is not None:
            slots = first_query[:, None] + np.arange(bucket.query_len)
            bucket = _with_distances(bucket, slots, extent)
        own.add(bucket, queries)
    return own


def _bounds(first_query: np.ndarray, query_lens: np.ndarray, window: int | None) -> mx.array:
    """Returns the slots visible to each request's rows, [R, 2]: first, and one past the last."""
    begins = np.maximum(0 if window is None else first_query - window + 1, 0)
    seen = np.stack(np.broadcast_arrays(begins, first_query + query_lens), axis=1)
    return mx.array(seen.astype(np.int32))


def _with_distances(bucket: Bucket, query_slots: np.ndarray, extent: int) -> Bucket:
    """Sets `distances`; `query_slots`: [n, Q], the slot of each query in the bucket's context."""
    found = query_slots[:, :, None] - np.arange(bucket.context_len)
    found[(found < 0) | (found > extent)] = extent
    return replace(bucket, distances=mx.array(found.astype(np.int32)))


def _pad_to(values: np.ndarray, count: int) -> np.ndarray:
    """Repeats the last value up to `count` values."""
    missing = max(0, count - len(values)) if len(values) else 0
    return np.pad(values, (0, missing), mode="edge") if missing else values


def _split_requests(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, block_tables: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Splits requests with more than MAX_SCORES scores."""
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    if int(query_start_loc[-1]) <= MIN_ROWS:
        return query_start_loc, seq_lens, block_tables
    context = seq_lens if window is None else np.minimum(seq_lens, window + ends - starts)
    rows = np.maximum(MAX_SCORES // context, MIN_ROWS)
    counts = -(-(ends - starts) // rows)
    if (counts == 1).all():
        return query_start_loc, seq_lens, block_tables
    request = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = starts[request] + number * rows[request]
    later = np.maximum(ends[request] - starts - rows[request], 0)  # rows of later pieces
    return np.append(starts, ends[-1]), seq_lens[request] - later, block_tables[request]


def _merge_shapes(shapes: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Returns [R] shapes, some replaced by a wider one whose padding costs less than a call.

    shapes: [R], 64 * log2 of padded rows plus log2 of padded blocks. context: [R] slots of each.
    """
    # Steps with few short requests then have the same calls, whatever the requests are. Shapes are
    # 64 times the query's plus the context's.
    if len(shapes) and (shapes == shapes[0]).all():
        return shapes
    joined = shapes.copy()
    wider, most = -1, 0
    for shape in np.unique(shapes)[::-1]:
        members = shapes == shape
        if wider // 64 == shape // 64 and (most - context[members]).sum() < MIN_SAVED:
            joined[members] = wider
        else:
            wider, most = int(shape), int(context[members].max())
    return joined


def _similar(
    shapes: np.ndarray, query_lens: np.ndarray, context: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields indices of requests of similar shape, in groups that one padded call may hold."""
    alike = len(shapes) > 0 and bool((shapes == shapes[0]).all())  # as in most steps
    for shape in shapes[:1] if alike else np.unique(shapes):
        members = np.arange(len(shapes)) if alike else np.flatnonzero(shapes == shape)
        q, s = int(query_lens[members].max()), int(context[members].max())
        most = max(1, min(MAX_SCORES // (q * s), MAX_GATHERED // s))
        for first in range(0, len(members), most):
            yield members[first : first + most]


def _log2_ceil(lengths: np.ndarray) -> np.ndarray:
    """Returns the smallest k with 2**k >= length, elementwise, for lengths of at least 1."""
    return np.ceil(np.log2(lengths)).astype(np.int64)


def _is_range(values: np.ndarray, count: int) -> bool:
    return len(values) == count and bool((values == np.arange(count)).all())


def _stable_widths(num_blocks: np.ndarray, num_requests: int) -> np.ndarray:
    """Rounds numbers of blocks up to WIDTHS per octave, more coarsely for few decode requests."""
    unit = np.maximum(1 << _log2_ceil(np.maximum(num_blocks, 1)), 2 * WIDTHS) // (2 * WIDTHS)
    unit = np.maximum(unit, STABLE_BLOCKS // max(num_requests, 1))
    return -(-num_blocks // unit) * unit


def _bucket(
    table: PaddedTable,
    queries: PaddedQueries,
    first_query: np.ndarray | None,
    writes: StepWrites,
    block_size: int,
    num_tokens: int,
    window: int | None = None,
    newest: np.ndarray | None = None,
    masked: bool = True,
) -> Bucket:
    """Makes a bucket.

    Args beyond the plan's:
        first_query: [n] slot of each request's first row; None: all slots are visible.
        newest: [n] last slot that each request's rows see; None: their own.
    """
    n, q = queries.rows.shape
    s = table.blocks.shape[1] * block_size
    mask = None
    if first_query is not None and masked:
        query_slots = (first_query[:, None] + np.arange(q))[:, :, None]  # [n, Q, 1]
        slots = np.arange(s)
        last = query_slots if newest is None else np.broadcast_to(newest[:, None, None], (n, q, 1))
        mask = slots <= last
        if window is not None:
            mask &= slots > query_slots - window
    rows = queries.rows.ravel()
    if writes.follow and first_query is not None:
        fresh, sources = writes.in_order(table, rows)
    else:
        fresh, sources = writes.into(table)
        if writes.left_out:  # keep the shape, however many are left out
            fresh, sources = _pad_to(fresh, n * q), _pad_to(sources, n * q)
    return Bucket(
        num_requests=n,
        query_len=q,
        context_len=s,
        block_table=mx.array(table.blocks),
        rows=None if _is_range(rows, num_tokens) else mx.array(rows.astype(np.int32)),
        fresh=mx.array(fresh),
        sources=None if _is_range(sources, len(writes)) else mx.array(sources),
        mask=None if mask is None else mx.array(mask[:, None]),
    )
