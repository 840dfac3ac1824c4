# SPDX-License-Identifier: Apache-2.0
"""Decides which threadgroup computes which rows, once a step for each shape and window."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.layout import PositionLag, stable
from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention.splits import (
    ALWAYS,
    DEFAULT,
    MOST_FIXED_ROWS,
    WHOLE,
    Contexts,
    Splits,
)

_NO_WINDOW = 2**31 - 1
_STRIP = 4  # the context of a tile starts at a multiple

#: Sizes of keys and values where values are the first elements of keys: DeepSeek-V2 and later, a
#: rank of 512 and 64 rotated.
LATENT_SIZES = ((576, 512),)

#: A tile of fewer rows counts as one of so many, for its time goes into loading K and V. MOST_WORK
#: is then 17 GB of float16 K and V: 0.4 s at 40 of the 68 GB/s of an M1.
_LEAST_ROWS = 16


@dataclass(frozen=True)
class AttentionShape:
    """Heads and head sizes of one layer's attention."""

    num_heads: int  # H
    num_kv_heads: int  # Hkv
    head_size: int  # D, of queries and keys
    value_size: int  # DV

    @property
    def latent(self) -> bool:
        return (self.head_size, self.value_size) in LATENT_SIZES

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Most packed rows of a request that the decode kernel serves.

        They are one tile, so that K and V are loaded once; but what takes arithmetic longer than
        loads, the latents of many heads, is read again for each tile of up to eight query rows.
        """
        return 8 * self.group if self.latent else self.decode_tile_rows

    @property
    def decode_tile_rows(self) -> int:
        """Packed rows of the decode kernel's largest tile, whose threadgroup has 256 threads."""
        size = self.value_size if self.latent else self.head_size
        return 32 if size <= 128 else 16 if size <= 256 else 8

    @property
    def tile_rows(self) -> int:
        """Packed rows of the prefill kernel's largest tile.

        Its threadgroup then has 256 threads, for any head size (op.py): a pipeline takes 384 at
        least, however many registers a thread needs (Mesa, agx_performance.c), and 512 not always.
        """
        return 64 if self.head_size <= 128 else 32 if self.head_size <= 256 else 16

    def work(self, rows: int, keys: int) -> int:
        """FLOPs of tiles of `rows` packed rows over `keys` positions in all, of all K/V heads."""
        products = 2 * (self.head_size + self.value_size)  # with a key, and with its value
        return max(rows, _LEAST_ROWS) * keys * self.num_kv_heads * products


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles that a plan may choose from, in packed rows, ascending.

    Plans choose from it and from nothing else. The self-check tries each, and each is compiled
    before a model serves.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    split: bool  # whether contexts may be split

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def for_layer(shape: AttentionShape, window: int | None = None) -> Tiles:
        """All sizes that rows of such layers may need."""
        decode, prefill = set(), set()
        most = shape.decode_rows + shape.tile_rows + shape.group
        for packed in range(shape.group, most, shape.group):
            rows = max(8, _power_of_two(packed))
            if packed <= shape.decode_rows:
                decode.add(min(shape.decode_tile_rows, rows))
            else:
                prefill.add(min(shape.tile_rows, rows))
        longest = (window or _NO_WINDOW) + shape.tile_rows + _STRIP  # keys that a tile may see
        return Tiles(tuple(sorted(decode)), tuple(sorted(prefill)), longest > WHOLE)

    def only(self, decode: bool, rows: int) -> Tiles:
        """This size alone, which then serves all rows."""
        return Tiles((rows,) if decode else (), () if decode else (rows,), self.split)


@dataclass(frozen=True)
class Dispatch:
    """One launch of the decode or the prefill kernel; the structs of shared/attention.metal."""

    decode: bool
    rows: int  # packed rows of a tile, a power of two
    num_rows: int  # output rows, n
    num_tiles: int  # N; the last few may have no rows, so that N stays for many steps
    part_rows: int  # of all parts of split contexts; as `num_tiles`, and 0: none is split
    requests: mx.array  # [max(R, 2), 4] int32, Request
    tiles: mx.array  # [N, 8] int32, Tile
    bounds: mx.array  # [8] int32, Bounds
    splits: mx.array | None  # [max(n, 4), 2] int32, struct Row of reduce.metal; None: none is split
    #: FLOPs; MOST_WORK at most, unless a single tile or query row takes more.
    work: int = field(compare=False)

    @property
    def num_splits(self) -> int:
        """The most parts that a context is split into."""
        return 1 if self.splits is None else int(self.splits[:, 1].max())


@dataclass(frozen=True)
class AttentionPlan:
    """How one step's rows attend, for all layers that share a block table, shape and window."""

    shape: AttentionShape
    num_tokens: int  # T
    dispatches: tuple[Dispatch, ...]
    block_tables: mx.array  # [R, a power of two, 8 at least] int32
    order: mx.array | None  # [T] int32, place of row t in the dispatches' outputs; None: t

    @property
    def work(self) -> int:
        """FLOPs of a layer."""
        return sum(dispatch.work for dispatch in self.dispatches)

    @property
    def pipelines(self) -> tuple[tuple[bool, int, bool], ...]:
        """What each dispatch launches: kernel, rows, whether in parts."""
        return tuple((x.decode, x.rows, x.part_rows > 0) for x in self.dispatches)


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    shape: AttentionShape,
    window: int | None = None,
    tiles: Tiles | None = None,
    most_work: int = MOST_WORK,
    behind: PositionLag | None = None,
    splits: Splits = DEFAULT,
) -> AttentionPlan:
    """Cuts R requests' rows into tiles.

    Args:
        query_start_loc: [R + 1] int32, first batch row of each request.
        seq_lens: [R] int32, context of each request including this step's rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        shape: of the layers' attention.
        window: a query at position p sees positions (p - window, p]; None sees [0, p].
        tiles: to choose from, one of a kind at least; None: all.
        most_work: FLOPs of a dispatch; tiles that take more are spread over several.
        behind: by how much `seq_lens` is too large; the requests' rows lie that far before.
            None: by nothing.
        splits: how contexts are cut, where `tiles` may be split.
    """
    tiles = tiles or Tiles.for_layer(shape, window)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    first_positions = seq_lens - query_lens
    batch = _Batch(
        query_start_loc,
        seq_lens,
        query_lens,
        first_positions,
        np.zeros_like(seq_lens) if behind is None else behind.most_np,
        None if behind is None else _shift(behind.counts),
        shape,
        window or _NO_WINDOW,
    )
    packed = query_lens * shape.group
    decodes = _decoded(packed, shape, tiles)
    if splits.fixed is not None and tiles.decode:
        # By the arithmetic of a row alone, in several tiles if need be.
        decodes |= query_lens <= MOST_FIXED_ROWS
    kinds = [
        (decode, members)
        for decode, members in ((True, np.flatnonzero(decodes)), (False, np.flatnonzero(~decodes)))
        if len(members)
    ]
    dispatches, pieces, may_split = [], [], splits if tiles.split else None
    for decode, members in kinds:
        sizes, most = tiles.decode if decode else tiles.prefill, packed[members].max()
        rows = next((size for size in sizes if size >= most), sizes[-1])
        for piece in batch.pieces(members, rows, most_work):
            dispatches.append(_dispatch(decode, rows, batch, piece, may_split))
            pieces.append(piece)
    width = _power_of_two(max(block_tables.shape[1], MIN_ELEMENTS))
    table = np.zeros((len(seq_lens), width), np.int32)
    table[:, : block_tables.shape[1]] = block_tables
    return AttentionPlan(
        shape=shape,
        num_tokens=int(query_start_loc[-1]),
        dispatches=tuple(dispatches),
        block_tables=mx.array(table),
        order=_order(batch, pieces) if len(kinds) > 1 else None,
    )


def trials(shape: AttentionShape, window: int | None, tiles: Tiles) -> Iterator[AttentionPlan]:
    """Small plans that launch, between them, every pipeline a plan over `tiles` may launch.

    All are of one request, of up to tiles.prefill[-1] rows, over block 0 alone.
    """
    kinds = [(True, rows) for rows in tiles.decode] + [(False, rows) for rows in tiles.prefill]
    for decode, rows in kinds:
        # Query rows that fill a tile. A tile of less than one query row may reach into the next,
        # and so see one key more.
        queries = [rows // shape.group] if rows >= shape.group else [1, 2]
        # The shortest context that is split, and one that is split in a window: its first key is
        # rounded down to a strip, so one of four contexts is longest.
        lengths = [queries[0]] + (
            [WHOLE + 1, *(2 * WHOLE + k for k in range(_STRIP))] if tiles.split else []
        )
        made = {
            trial.pipelines: trial
            for trial in (
                plan(
                    np.array([0, query], np.int32),
                    np.array([query + length], np.int32),
                    np.zeros((1, -(-(query + length) // 16)), np.int32),
                    shape,
                    window,
                    tiles.only(decode, rows),
                    splits=ALWAYS,
                )
                for query in queries
                for length in lengths
            )
        }
        yield from made.values()


def _power_of_two(count: int) -> int:
    """The smallest that is not less."""
    return 1 << (count - 1).bit_length()


def _decoded(packed: np.ndarray, shape: AttentionShape, tiles: Tiles) -> np.ndarray:
    """[R] bool, requests that the decode kernel serves; `packed` has the rows of each."""
    if not tiles.decode or not tiles.prefill:
        return np.full(len(packed), bool(tiles.decode))
    return packed <= tiles.decode[-1] * (shape.decode_rows // shape.decode_tile_rows)


def _shift(counts: mx.array) -> mx.array:
    """[max(R, 2), 4] int32: [R] counts in the fields of Request that are positions or lengths."""
    rows = mx.pad(counts, (0, max(0, MIN_ELEMENTS // 4 - len(counts))))
    return rows[:, None] * mx.array([0, 0, 1, 1], mx.int32)


def _starts(counts: np.ndarray) -> np.ndarray:
    """First index of each run, where runs of such lengths follow each other."""
    return counts.cumsum() - counts


@dataclass(frozen=True)
class _Pieces:
    """P runs of rows, each of one request, in the order of the output; each begins a tile."""

    request: np.ndarray  # [P]
    first_row: np.ndarray  # [P] of the request's rows in this step
    num_rows: np.ndarray  # [P]


@dataclass(frozen=True)
class _Batch:
    """A step's R requests, and the layers' shape and window."""

    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    query_lens: np.ndarray  # [R]
    first_positions: np.ndarray  # [R] of each one's first row
    most_behind: np.ndarray  # [R] how far before both may lie
    shift: mx.array | None  # [max(R, 2), 4] int32, to be taken off Request; None: nothing
    shape: AttentionShape
    window: int

    def packed_step(self, rows: int) -> int:
        """Packed rows from one tile to the next: whole query rows, where a tile can hold one."""
        return rows // self.shape.group * self.shape.group or rows

    def pieces(self, members: np.ndarray, rows: int, most_work: int) -> Iterator[_Pieces]:
        """Cuts requests `members`, in tiles of `rows`, into dispatches of up to `most_work`.

        No two pieces of a request are in the same dispatch: one alone leaves no room for a tile.
        """
        group, step = self.shape.group, self.packed_step(rows)
        lens = self.query_lens[members]
        # The most keys of a tile: it spans step / group query rows, or two, and begins at a strip.
        seen = self.window + max(step // group, 2) + _STRIP - 2 + int(self.most_behind.max())
        num_tiles = int(lens.sum()) * group // step + len(lens)  # at most
        if num_tiles * self.shape.work(rows, min(seen, int(self.seq_lens.max()))) <= most_work:
            yield _Pieces(members, np.zeros_like(members), lens)  # as in most steps
            return
        keys = np.minimum(self.seq_lens[members].astype(np.int64), seen)
        of_tile = keys * self.shape.work(rows, 1)
        at_once = np.maximum(np.maximum(most_work // of_tile, 1) * step // group, 1)  # query rows
        counts = -(-lens // at_once)
        owner = np.repeat(np.arange(len(members)), counts)
        first = (np.arange(len(owner)) - _starts(counts)[owner]) * at_once[owner]
        num_rows = np.minimum(at_once[owner], lens[owner] - first)
        work = -(-num_rows * group // step) * of_tile[owner]
        for piece in _in_order(work, most_work):
            yield _Pieces(members[owner[piece]], first[piece], num_rows[piece])


def _order(batch: _Batch, pieces: Sequence[_Pieces]) -> mx.array | None:
    """[T] int32, place of row t in the outputs of these dispatches; None: rows keep their order."""
    first = np.concatenate([batch.query_start_loc[x.request] + x.first_row for x in pieces])
    lens = np.concatenate([x.num_rows for x in pieces])
    places = np.arange(lens.sum(), dtype=np.int32)
    written = np.repeat(first - _starts(lens), lens) + places  # batch row of each output row
    if (written == places).all():
        return None
    order = np.empty_like(places)
    order[written] = places
    return mx.array(order)


def _in_order(work: np.ndarray, most: int) -> Iterator[slice]:
    """Cuts `work` into runs that add up to `most` at most; an element above `most` is alone."""
    ends, start = np.cumsum(work), 0
    while start < len(work):
        before = ends[start] - work[start]
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        yield slice(start, stop)
        start = stop


def _dispatch(
    decode: bool, rows: int, batch: _Batch, pieces: _Pieces, splits: Splits | None
) -> Dispatch:
    """The dispatch that serves `pieces`, in tiles of `rows`."""
    shape, group, stride = batch.shape, batch.shape.group, batch.packed_step(rows)
    packed = pieces.num_rows * group
    num_rows = int(pieces.num_rows.sum())
    first_position = batch.first_positions[pieces.request]

    per_piece = -(-packed // stride)
    owner = np.arange(len(packed)).repeat(per_piece)
    first_tile = _starts(per_piece)
    in_piece = (np.arange(len(owner)) - first_tile[owner]) * stride
    count = np.minimum(stride, packed[owner] - in_piece)
    begin_packed = pieces.first_row[owner] * group + in_piece
    first = first_position[owner]
    most_behind = batch.most_behind[pieces.request][owner]
    oldest = first - most_behind + begin_packed // group - batch.window + 1
    begin = np.maximum(oldest, 0) // _STRIP * _STRIP
    end = first + (begin_packed + count - 1) // group + 1

    seen = end - begin
    contexts = Contexts(
        begin=begin,
        end=end,
        seen=seen,
        certain=seen - most_behind,  # or less, where the context begins sooner
        piece=owner,
        first_tile=first_tile,
        query_rows=batch.query_lens[pieces.request],
        tile_rows=rows,
        result_bytes=rows * shape.value_size * 4,
        num_heads=shape.num_kv_heads,
    )
    parts = contexts.whole() if splits is None else splits.cut(contexts)
    rows_of = pieces.num_rows * parts.counts  # of each piece, in the output or its parts
    first_rows = _starts(rows_of)
    of_tile = owner[parts.tile]
    tiles = np.zeros((stable(len(of_tile)), 8), np.int32)
    made = tiles[: len(of_tile)]
    made[:, 0] = pieces.request[of_tile]
    made[:, 1] = begin_packed[parts.tile]
    made[:, 2] = count[parts.tile]
    made[:, 3] = parts.begin
    made[:, 4] = parts.end
    made[:, 5] = parts.number
    made[:, 6] = parts.counts[of_tile]
    # The longest first, so that no long one is left for the end.
    made[:] = made[(parts.begin - parts.end).argsort(kind="stable")]

    requests = np.zeros((max(len(batch.seq_lens), MIN_ELEMENTS // 4), 4), np.int32)
    requests[pieces.request, 0] = batch.query_start_loc[pieces.request]
    # The output row of the request's first row; negative where a dispatch before this one has it.
    requests[pieces.request, 1] = first_rows - pieces.first_row * parts.counts
    requests[pieces.request, 2] = first_position
    requests[pieces.request, 3] = batch.seq_lens[pieces.request]
    bounds = np.zeros(MIN_ELEMENTS, np.int32)
    bounds[0] = batch.window
    part_rows = int(first_rows[-1] + rows_of[-1])
    split = part_rows > num_rows
    return Dispatch(
        decode=decode,
        rows=rows,
        num_rows=num_rows,
        num_tiles=len(tiles),
        part_rows=max(stable(part_rows), MIN_ELEMENTS // 2) if split else 0,
        requests=mx.array(requests) if batch.shift is None else mx.array(requests) - batch.shift,
        tiles=mx.array(tiles),
        bounds=mx.array(bounds),
        splits=mx.array(parts.of_rows(pieces.num_rows)) if split else None,
        work=shape.work(rows, int(seen.sum())),
    )
