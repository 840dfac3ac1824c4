# SPDX-License-Identifier: Apache-2.0
"""Decides, once a step, which requests attend together where MLX's operations attend.

Requests of like shape form a *bucket*. What requests have in common at their beginning may be a
bucket too, of all their rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention.common_prefix import common_prefixes
from metal_kernels.paged_attention.padded_rows import PaddedQueries, PaddedTable, StepWrites

#: The most scores of a head, and the most gathered slots, of one attention call: a step's memory
#: does not grow with the context. A request that needs more gets calls of its own, of MIN_ROWS rows
#: or more each; every call gathers the context anew, which costs as much as a few rows.
MAX_SCORES = 2**20
MAX_GATHERED = 2**15
MIN_ROWS = 64
#: A table of a step that decodes is as wide as one of so many widths from a power of two to the
#: next: its shape then stays the same for many steps, and it grows by an eighth at most.
WIDTHS = 8
#: The shape also stays for as many blocks in all requests together: a new one has to be built in
#: Python and compiled, 25 ms at 28 layers, which pays for the slots that a few steps pad.
STABLE_BLOCKS = 4
DECODE_ROWS = 16  # a request with more rows prefills, and comes once
#: Slots that a call more has to save, at least: one over a common beginning, or for shorter
#: requests. A slot takes 0.4 microseconds a layer on two x86 cores (16 requests of 600 tokens): so
#: many pay for the operations of a call.
MIN_SAVED = 512

Places = tuple[mx.array, ...]  # of an array's first axes, one index array for each


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
    mask: mx.array | None  # [n, 1, Q, S] bool, True where a query may look; None: everywhere
    #: Slots that are no padding, where the rows are the last of one request and see all before
    #: themselves: MLX's fused attention then skips what no row sees. None: the mask says it all.
    causal_len: int | None = None
    bounds: mx.array | None = None  # [n, 2] int32, slots of the context that any row sees
    _places: dict[int, tuple[Places, Places]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def places(self, num_heads: int) -> tuple[Places, Places]:
        """Where the context's blocks, and the rows that this step writes, lie in all heads.

        Made for the first layer, and the same for all others of as many K/V heads.

        Args:
            num_heads: K/V heads, Hkv.

        Returns:
            Head and block of the pool, each [Hkv, n, S / block_size] int32; head, request and slot
            of the context, each [f * Hkv] int32, the heads of a row one after another.
        """
        if num_heads not in self._places:
            heads = mx.array(np.arange(num_heads, dtype=np.int32))
            blocks = num_heads, *self.block_table.shape
            rows = self.fresh.size, num_heads
            slots = mx.broadcast_to(self.fresh[:, None], rows).flatten()
            self._places[num_heads] = (
                (
                    mx.broadcast_to(heads[:, None, None], blocks),
                    mx.broadcast_to(self.block_table, blocks),
                ),
                (mx.broadcast_to(heads, rows).flatten(), *mx.divmod(slots, self.context_len)),
            )
        return self._places[num_heads]

    def work(self, num_heads: int, sizes: int) -> int:
        """FLOPs; `sizes` is that of a key and of a value together."""
        return 2 * self.num_requests * self.query_len * self.context_len * num_heads * sizes


@dataclass(frozen=True)
class BucketPlan:
    """How one step's rows attend, for all layers that share a block table and a window."""

    num_tokens: int  # T
    buckets: tuple[Bucket, ...]
    order: mx.array | None  # [T] int32, place of row t in the concatenated padded outputs
    shared: tuple[Bucket, ...] = ()  # beginnings that requests have in common, each as one request
    shared_order: mx.array | None = None  # [T] int32, as `order`; one past the last: no such row

    @property
    def calls(self) -> tuple[Bucket, ...]:
        """All that a layer computes."""
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
) -> BucketPlan:
    """Groups R requests into buckets of like shape.

    A bucket holds requests whose query and context lengths round up to the same power of two, so
    padding at most doubles either, and a step has few buckets whatever its number of requests.
    Requests of shorter contexts join a bucket where that pads less than a call of their own costs.

    Args:
        query_start_loc: [R + 1] int32, first batch row of each request.
        seq_lens: [R] int32, context of each request including this step's rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        slot_mapping: [T] int32, pool slot each row's K/V go to; -1: nobody reads them. A request
            may read blocks that another one writes in this same step (a prefix hit on a prompt just
            scheduled).
        block_size: tokens of a block.
        window: a query at position p sees positions (p - window, p]; None sees [0, p].
        share: whether blocks that requests begin with in common are gathered once for all of them.
            `run` then takes plain operations, and needs a plan without a window.
        causal: whether buckets of a prompt's rows tell their `causal_len`, which differs from step
            to step where the padded shape does not. For MLX's fused attention.
        earlier_slots: [E] int32, pool slots of rows that steps before had of the same requests, as
            many of each, where the pool does not hold their K/V yet; -1: nobody reads that row.
            `run` then takes the K/V of E + T rows, these first.
        bounded: whether buckets tell their `bounds`, which a read of the pool keeps to.
    """
    pieces = _in_pieces(query_start_loc, seq_lens, block_tables, window)
    query_start_loc, seq_lens, block_tables = pieces
    query_lens = np.diff(query_start_loc)
    first_block = np.zeros_like(seq_lens)
    num_tokens = int(query_start_loc[-1])
    writes = StepWrites(slot_mapping, block_size, earlier_slots)
    shared = _Calls(num_tokens)
    if window is not None:
        first_block = np.maximum(seq_lens - query_lens - window + 1, 0) // block_size
    elif share and len(query_lens) > 1:
        whole = (seq_lens - query_lens) // block_size  # blocks that all rows of a request see
        first_block = _add_shared(shared, query_lens, whole, block_tables, writes, block_size)
    own = _own_calls(pieces, first_block, writes, block_size, window, causal, bounded)
    return BucketPlan(
        num_tokens, tuple(own.buckets), own.order(), tuple(shared.buckets), shared.order()
    )


class _Calls:
    """Buckets, and where their outputs have the batch's rows."""

    def __init__(self, num_tokens: int) -> None:
        self.buckets: list[Bucket] = []
        self._places = np.full(num_tokens, -1, np.int32)
        self._size = 0

    def add(self, bucket: Bucket, queries: PaddedQueries) -> None:
        self._places[queries.rows[queries.real]] = self._size + np.flatnonzero(queries.real)
        self._size += queries.rows.size
        self.buckets.append(bucket)

    def order(self) -> mx.array | None:
        """[T] int32, each row's place; one past the last: it is in no bucket. None: in order."""
        if self._size == len(self._places) and _is_range(self._places, self._size):
            return None
        return mx.array(np.where(self._places < 0, self._size, self._places))


def _shared_rows(rows: np.ndarray, num_requests: int, context_len: int) -> list[np.ndarray]:
    """The rows of each call over what requests have in common; none where it would not pay."""
    most = max(MAX_SCORES // context_len, MIN_ROWS)
    calls = np.split(rows, range(most, len(rows), most))
    pays = num_requests >= 2 * len(calls)  # pieces of one long prompt gather no less together
    pays &= (num_requests - len(calls)) * context_len >= MIN_SAVED * len(calls)
    return calls if pays else []


def _add_shared(
    shared: _Calls,
    query_lens: np.ndarray,
    whole: np.ndarray,
    block_tables: np.ndarray,
    writes: StepWrites,
    block_size: int,
) -> np.ndarray:
    """Adds calls over blocks that requests begin with in common.

    Args:
        shared: gets the calls.
        query_lens: [R] rows of each request.
        whole: [R] blocks that all rows of a request see.
        block_tables, writes, block_size: as in `plan`.

    Returns:
        [R] the first block of each request that is left.
    """
    first_block = np.zeros_like(whole)
    requests = np.repeat(np.arange(len(query_lens)), query_lens)  # of each row
    group, lengths = common_prefixes(block_tables, whole)
    for number, length in enumerate(lengths.tolist()):
        members = np.flatnonzero(group == number)
        rows = np.flatnonzero(np.isin(requests, members)).astype(np.int32)
        for of_call in _shared_rows(rows, len(members), length * block_size):
            table = PaddedTable.padded(
                block_tables[members[:1]], np.zeros(1, int), [length], length
            )
            queries = PaddedQueries(of_call[None], np.ones((1, len(of_call)), bool))
            shared.add(_bucket(table, queries, None, writes, block_size, len(requests)), queries)
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
) -> _Calls:
    """Calls over what each request has of its own.

    Args beyond the plan's:
        requests: `query_start_loc`, `seq_lens` and `block_tables`.
        first_block: [R] of each request that these calls gather.
        writes: of this step.
    """
    query_start_loc, seq_lens, block_tables = requests
    query_lens, num_tokens = np.diff(query_start_loc), int(query_start_loc[-1])
    own = _Calls(num_tokens)
    num_blocks = -(-seq_lens // block_size) - first_block
    decodes = query_lens <= DECODE_ROWS
    widths = num_blocks
    if writes.follow:  # one slot more, which no row sees
        widths = -(-(seq_lens + 1) // block_size) - first_block
    widths = np.where(decodes, _stable(widths, decodes.sum()), widths)
    shapes = _log2_ceil(query_lens) * 64 + _log2_ceil(widths)  # 2**64 blocks are enough
    shapes = _joined(shapes, widths * block_size)
    for members in _alike(shapes, query_lens, widths * block_size):
        table = PaddedTable.padded(
            block_tables[members], first_block[members], num_blocks[members], widths[members].max()
        )
        queries = PaddedQueries.padded(query_start_loc[members], query_lens[members])
        first_query = (seq_lens - query_lens - first_block * block_size)[members]
        bucket = _bucket(table, queries, first_query, writes, block_size, num_tokens, window)
        if causal and window is None and len(members) == 1 and not decodes[members[0]]:
            bucket = replace(bucket, causal_len=int(seq_lens[members[0]]))
        if bounded:
            bounds = _bounds(first_query, query_lens[members], window)
            bucket = replace(bucket, bounds=bounds)
        own.add(bucket, queries)
    return own


def _bounds(first_query: np.ndarray, query_lens: np.ndarray, window: int | None) -> mx.array:
    """[R, 2] int32, the first slot that a request's rows see, and the one past the last."""
    begins = np.maximum(0 if window is None else first_query - window + 1, 0)
    seen = np.stack(np.broadcast_arrays(begins, first_query + query_lens), axis=1)
    return mx.array(seen.astype(np.int32))


def _repeated(values: np.ndarray, count: int) -> np.ndarray:
    """[count at least] the values, and then the last of them again and again."""
    missing = max(0, count - len(values)) if len(values) else 0
    return np.pad(values, (0, missing), mode="edge") if missing else values


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
    later = np.maximum(ends[request] - starts - rows[request], 0)  # rows of later pieces
    return np.append(starts, ends[-1]), seq_lens[request] - later, block_tables[request]


def _joined(shapes: np.ndarray, context: np.ndarray) -> np.ndarray:
    """The shapes, a wider one in place of those for which a call of their own does not pay.

    So steps of few short requests have the same calls, whatever requests they are.

    Args:
        shapes: [R] int, 64 times that of the query and that of the context.
        context: [R] int, slots of each.
    """
    joined = shapes.copy()
    wider, most = -1, 0
    for shape in np.unique(shapes)[::-1]:
        members = shapes == shape
        if wider // 64 == shape // 64 and (most - context[members]).sum() < MIN_SAVED:
            joined[members] = wider
        else:
            wider, most = int(shape), int(context[members].max())
    return joined


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


def _stable(num_blocks: np.ndarray, num_requests: int) -> np.ndarray:
    """Numbers of blocks, each rounded up to the next of WIDTHS in its octave, or more coarsely
    where few requests decode."""
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
) -> Bucket:
    """
    Args beyond the plan's:
        first_query: [n] int32, context slot of each request's first row; None: behind the context.
    """
    n, q = queries.rows.shape
    s = table.blocks.shape[1] * block_size
    mask = None
    if first_query is not None:
        query_slots = (first_query[:, None] + np.arange(q))[:, :, None]  # [n, Q, 1]
        slots = np.arange(s)
        mask = slots <= query_slots
        if window is not None:
            mask &= slots > query_slots - window
    rows = queries.rows.ravel()
    if writes.follow and first_query is not None:
        fresh, sources = writes.in_order(table, rows)
    else:
        fresh, sources = writes.into(table)
        if writes.left_out:  # the same shape, however many
            fresh, sources = _repeated(fresh, n * q), _repeated(sources, n * q)
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
