# SPDX-License-Identifier: Apache-2.0
"""Describes one launch of an attention kernel: which threadgroup computes which rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.layout import stable
from metal_kernels.paged_attention.pieces import Batch, Pieces, starts
from metal_kernels.paged_attention.shared import SharedPrefixes
from metal_kernels.paged_attention.splits import MOST_RESULTS, Contexts, Parts, Splits
from metal_kernels.paged_attention.tiles import STRIP

#: A position behind every prefix, so that a row sees all of it, without overflow in sums.
_BEHIND_ALL = 2**30


@dataclass(frozen=True)
class Dispatch:
    """One launch of the decode or prefill kernel, with structs of shared/attention.metal."""

    decode: bool
    rows: int  # packed rows of a tile, a power of two
    num_rows: int  # output rows, n; for shared prefixes, rows that read them
    num_tiles: int  # N; the last few may be empty, so that N stays the same for many steps
    part_rows: int  # of all parts of split contexts, padded like `num_tiles`; 0: none is split
    requests: mx.array  # [max(R or n, 2), 4] int32, Request
    tiles: mx.array  # [N, 8] int32, Tile
    window: int  # visible positions of a query, including its own
    splits: mx.array | None  # [max(n, 2), 4] int32, Row of reduce.metal; None: none is split
    walkers: int  # simdgroups that join a row's parts; 0: none is split
    #: FLOPs including those of `shared`; at most MOST_WORK, unless a single tile or row takes more.
    work: int = field(compare=False)
    #: Reads prefixes shared by these rows, and leaves partial results, which `splits` refers to.
    shared: Dispatch | None = None
    listed: bool = False  # whether `requests` has an entry per query row
    wide: bool = False  # decode only: whether threadgroups have 512 threads instead of 256
    #: Whether all rows of a request are in one tile, which serves them even if they see later ones.
    in_one_tile: bool = field(default=False, compare=False)

    @property
    def launches(self) -> tuple[Dispatch, ...]:
        """Kernel launches, in order: this dispatch, then that of shared prefixes, if any."""
        return (self,) if self.shared is None else (self, self.shared)

    @property
    def num_splits(self) -> int:
        """Largest number of parts that any row's own context is split into; 1: none is split."""
        return 1 if self.splits is None else int(self.splits[:, 1].max())


def dispatch_of(
    decode: bool,
    rows: int,
    batch: Batch,
    pieces: Pieces,
    splits: Splits | None,
    common: SharedPrefixes | None = None,
) -> Dispatch:
    """Makes the dispatch for `pieces`, in tiles of `rows` packed rows.

    `splits`: how to split contexts; None: do not. `common`: prefixes that another dispatch reads.
    """
    shape = batch.shape
    cut = _in_tiles(pieces.num_rows * shape.group, batch.packed_step(rows))
    begin_packed = pieces.first_row[cut.piece] * shape.group + cut.begin
    contexts = _contexts(rows, batch, pieces, cut, begin_packed, common)
    parts = contexts.whole() if splits is None else splits.cut(contexts)
    rows_of = pieces.num_rows * parts.counts  # of each piece, in the output or in parts
    first_rows = starts(rows_of)
    tiles = _tiles(parts, cut.piece, pieces.request, None, begin_packed, cut.rows)

    num_requests = len(batch.seq_lens)
    requests = np.zeros((max(num_requests, MIN_ELEMENTS // 4), 4), np.int32)
    whole = len(pieces.request) == num_requests  # all requests of the step, in order
    members = slice(num_requests) if whole else pieces.request
    requests[members, 0] = batch.query_start_loc[pieces.request]
    # The output row of the request's first row; negative if that is in a previous dispatch.
    requests[members, 1] = first_rows - pieces.first_row * parts.counts
    requests[members, 2] = batch.first_positions[pieces.request]
    requests[members, 3] = batch.seq_lens[pieces.request]
    num_rows, part_rows = int(pieces.num_rows.sum()), int(first_rows[-1] + rows_of[-1])
    shared, joined, walkers = None, None, 0
    if common is not None or part_rows > num_rows:
        joined = parts.of_rows(pieces.num_rows)
        assert splits is not None
        if common is not None:
            shared = _shared(batch, pieces, common, splits, joined)
        most = int((joined[:, 1] + joined[:, 3]).max())
        walkers = splits.walkers(num_rows * shape.num_heads, most, shape.value_size)
    return Dispatch(
        decode=decode,
        rows=rows,
        num_rows=num_rows,
        num_tiles=len(tiles),
        part_rows=0 if joined is None else max(stable(part_rows), MIN_ELEMENTS // 2),
        requests=mx.array(requests) if batch.shift is None else mx.array(requests) - batch.shift,
        tiles=mx.array(tiles),
        window=batch.window,
        splits=None if joined is None else mx.array(joined),
        walkers=walkers,
        work=shape.work(rows, int(contexts.seen.sum())),
        shared=shared,
        in_one_tile=pieces.whole and len(cut.piece) == len(pieces.request),
    )


def _contexts(
    rows: int,
    batch: Batch,
    pieces: Pieces,
    cut: _InTiles,
    begin_packed: np.ndarray,
    common: SharedPrefixes | None,
) -> Contexts:
    """Returns the contexts of the tiles, without the prefixes in `common`."""
    shape, request = batch.shape, pieces.request[cut.piece]
    first, most_behind = batch.first_positions[request], batch.most_behind[request]
    oldest = first - most_behind + begin_packed // shape.group - batch.window + 1
    begin = np.maximum(oldest, 0) // STRIP * STRIP
    if common is not None:
        begin = np.maximum(begin, common.of_pieces[cut.piece])
    end = first + (begin_packed + cut.rows - 1) // shape.group + 1
    if batch.bidirectional:
        end = batch.seq_lens[request]
    seen = end - begin
    return Contexts(
        begin=begin,
        end=end,
        seen=seen,
        certain=seen - most_behind,  # less if the window begins earlier
        piece=cut.piece,
        first_tile=cut.first,
        query_rows=batch.query_lens[pieces.request],
        tile_rows=rows,
        result_bytes=rows * shape.value_size * 4,
        num_heads=shape.num_kv_heads,
        most_results=MOST_RESULTS if common is None else MOST_RESULTS // 2,
    )


def _shared(
    batch: Batch, pieces: Pieces, common: SharedPrefixes, splits: Splits, joined: np.ndarray
) -> Dispatch:
    """Makes the dispatch that reads shared prefixes, with a Request for each row that shares one.

    `joined`: struct Row of reduce.metal, [max(n, 2), 4] int32; the prefixes' parts are added to it.
    """
    shape, rows = batch.shape, common.rows
    members = np.argsort(common.group, kind="stable")
    members = members[common.group[members] >= 0]  # pieces, by group
    counts = pieces.num_rows[members]
    group = common.group[members].repeat(counts)  # of each listed row
    within = np.arange(len(group)) - starts(counts).repeat(counts)
    num_rows = np.bincount(group)
    cut = _in_tiles(num_rows * shape.group, batch.packed_step(rows))
    keys = common.keys[cut.piece]
    contexts = Contexts(
        begin=np.zeros_like(keys),
        end=keys,
        seen=keys,
        certain=keys,
        piece=cut.piece,
        first_tile=cut.first,
        query_rows=num_rows,
        tile_rows=rows,
        result_bytes=rows * shape.value_size * 4,
        num_heads=shape.num_kv_heads,
        most_results=MOST_RESULTS // 2,
    )
    parts = splits.cut(contexts)
    of_row = parts.counts[group]
    in_output = starts(pieces.num_rows)[members].repeat(counts) + within
    joined[in_output, 2] = starts(of_row)
    joined[in_output, 3] = of_row

    requests = np.full((max(len(group), MIN_ELEMENTS // 4), 4), _BEHIND_ALL, np.int32)
    first_rows = batch.query_start_loc[pieces.request] + pieces.first_row
    requests[: len(group), 0] = first_rows[members].repeat(counts) + within
    requests[: len(group), 1] = starts(of_row)
    # All members' tables begin with the shared blocks.
    tables = pieces.request[members[starts(np.bincount(common.group[members]))]]
    # The same part of all tiles, then the next one, so that tiles that read the same keys run
    # together.
    tiles = _tiles(parts, cut.piece, starts(num_rows), tables, cut.begin, cut.rows, parts.number)
    return Dispatch(
        decode=True,
        rows=rows,
        num_rows=len(group),
        num_tiles=len(tiles),
        part_rows=max(stable(int(of_row.sum())), MIN_ELEMENTS // 2),
        requests=mx.array(requests),
        tiles=mx.array(tiles),
        window=batch.window,
        splits=None,
        walkers=0,
        work=shape.work(rows, int(keys.sum())),
        listed=True,
    )


class _InTiles(NamedTuple):
    """The N tiles that I pieces are divided into, in the order of pieces."""

    piece: np.ndarray  # [N]
    begin: np.ndarray  # [N] first packed row within the piece
    rows: np.ndarray  # [N] packed rows
    first: np.ndarray  # [I] first tile


def _in_tiles(packed: np.ndarray, step: int) -> _InTiles:
    """Divides pieces of [I] packed rows into tiles of up to `step` rows."""
    if packed.max() <= step:  # in most steps
        piece = np.arange(len(packed))
        return _InTiles(piece, np.zeros_like(piece), packed, piece)
    per_piece = -(-packed // step)
    piece = np.arange(len(packed)).repeat(per_piece)
    first = starts(per_piece)
    begin = (np.arange(len(piece)) - first[piece]) * step
    return _InTiles(piece, begin, np.minimum(step, packed[piece] - begin), first)


def _tiles(
    parts: Parts,
    piece: np.ndarray,
    request: np.ndarray,
    table: np.ndarray | None,
    begin_packed: np.ndarray,
    count: np.ndarray,
    before: np.ndarray | None = None,
) -> np.ndarray:
    """Returns an array of struct Tile, one per part, longest first, [N', 8] int32.

    Per piece: `request`, its index in the dispatch's requests, and `table`, its block table, if not
    that of the request. Per part: `before`, the order among parts of equal length.
    """
    of_part = piece[parts.tile]
    tiles = np.zeros((stable(len(of_part)), 8), np.int32)
    made = tiles[: len(of_part)]
    made[:, 0] = request[of_part]
    made[:, 1] = begin_packed[parts.tile]
    made[:, 2] = count[parts.tile]
    made[:, 3] = parts.begin
    made[:, 4] = parts.end
    made[:, 5] = parts.number
    made[:, 6] = parts.counts[of_part]
    if table is not None:
        made[:, 7] = table[of_part]
    # Longest first, so that no long one is left for the end.
    longest = parts.begin - parts.end
    order = longest.argsort(kind="stable") if before is None else np.lexsort((before, longest))
    made[:] = made[order]
    return tiles
