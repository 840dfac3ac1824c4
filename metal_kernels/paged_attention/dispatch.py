# SPDX-License-Identifier: Apache-2.0
"""Describes one launch of an attention kernel: which threadgroup computes which rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.layout import stable
from metal_kernels.paged_attention.pieces import Batch, Pieces, starts
from metal_kernels.paged_attention.splits import Contexts, Splits
from metal_kernels.paged_attention.tiles import STRIP


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


def dispatch_of(
    decode: bool, rows: int, batch: Batch, pieces: Pieces, splits: Splits | None
) -> Dispatch:
    """The dispatch that serves `pieces`, in tiles of `rows`."""
    shape, group, stride = batch.shape, batch.shape.group, batch.packed_step(rows)
    packed = pieces.num_rows * group
    num_rows = int(pieces.num_rows.sum())
    first_position = batch.first_positions[pieces.request]

    per_piece = -(-packed // stride)
    owner = np.arange(len(packed)).repeat(per_piece)
    first_tile = starts(per_piece)
    in_piece = (np.arange(len(owner)) - first_tile[owner]) * stride
    count = np.minimum(stride, packed[owner] - in_piece)
    begin_packed = pieces.first_row[owner] * group + in_piece
    first = first_position[owner]
    most_behind = batch.most_behind[pieces.request][owner]
    oldest = first - most_behind + begin_packed // group - batch.window + 1
    begin = np.maximum(oldest, 0) // STRIP * STRIP
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
    first_rows = starts(rows_of)
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
