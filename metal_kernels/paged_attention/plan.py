# SPDX-License-Identifier: Apache-2.0
"""Plans how a step's rows attend, once a step for each shape and window of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.layout import PositionLag
from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention.dispatch import Dispatch, dispatch_of
from metal_kernels.paged_attention.pieces import Batch, output_order
from metal_kernels.paged_attention.shape import AttentionShape
from metal_kernels.paged_attention.shared import beginnings
from metal_kernels.paged_attention.splits import DEFAULT, MOST_FIXED_ROWS, Splits
from metal_kernels.paged_attention.tiles import NO_WINDOW, WIDE_ROWS, Tiles, power_of_two


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
        return sum(launch.work for dispatch in self.dispatches for launch in dispatch.launches)

    @property
    def pipelines(self) -> tuple[tuple[bool, int, bool, bool], ...]:
        """What dispatches launch: kernel, rows, whether in parts, whether in 512 threads."""
        launches = (launch for dispatch in self.dispatches for launch in dispatch.launches)
        return tuple((x.decode, x.rows, x.part_rows > 0, x.wide) for x in launches)


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    shape: AttentionShape,
    window: int | None = None,
    tiles: Tiles | None = None,
    most_work: int = MOST_WORK,
    lag: PositionLag | None = None,
    splits: Splits = DEFAULT,
    block_size: int | None = None,
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
        block_size: tokens of a block. Where it is told, and parts are not of a fixed length, blocks
            that requests begin with in common are read once for the decoded rows of all.
    """
    tiles = tiles or Tiles.for_layer(shape, window)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    batch = Batch(
        query_start_loc,
        seq_lens,
        query_lens,
        seq_lens - query_lens,
        np.zeros_like(seq_lens) if lag is None else lag.most_np,
        None if lag is None else _shift(lag.counts),
        shape,
        window or NO_WINDOW,
    )
    packed = query_lens * shape.group
    kinds = _kinds(packed, shape, tiles, splits)
    dispatches, pieces = [], []
    for decode, members in kinds:
        sizes, most = tiles.decode if decode else tiles.prefill, packed[members].max()
        rows = next((size for size in sizes if size >= most), sizes[-1])
        for piece in batch.pieces(members, rows, most_work):
            common = None
            if decode and block_size is not None and splits.fixed is None:
                common = beginnings(batch, piece, rows, tiles, block_tables, block_size)
            made = dispatch_of(decode, rows, batch, piece, splits if tiles.split else None, common)
            dispatches.append(_widened(made, shape, tiles, splits))
            pieces.append(piece)
    return AttentionPlan(
        shape=shape,
        num_tokens=int(query_start_loc[-1]),
        dispatches=tuple(dispatches),
        block_tables=_padded(block_tables),
        order=output_order(batch, pieces) if len(kinds) > 1 else None,
    )


def _kinds(
    packed: np.ndarray, shape: AttentionShape, tiles: Tiles, splits: Splits
) -> list[tuple[bool, np.ndarray]]:
    """Requests that the decode kernel serves (True), and the prefill kernel, where there are any.

    Args:
        packed: [R] packed rows of each request.
        shape, tiles, splits: as in `plan`.
    """
    if not tiles.decode or not tiles.prefill:
        decodes = np.full(len(packed), bool(tiles.decode))
    else:
        decodes = packed <= tiles.decode[-1] * (shape.decode_rows // shape.decode_tile_rows)
        if splits.fixed is not None:
            # By the arithmetic of a row alone, in several tiles if need be.
            decodes |= packed <= MOST_FIXED_ROWS * shape.group
    kinds = (True, np.flatnonzero(decodes)), (False, np.flatnonzero(~decodes))
    return [(decode, members) for decode, members in kinds if len(members)]


def _widened(dispatch: Dispatch, shape: AttentionShape, tiles: Tiles, splits: Splits) -> Dispatch:
    """The dispatch, in wider threadgroups where it may have them and the GPU has room."""
    if not (tiles.wide and dispatch.decode) or dispatch.rows != WIDE_ROWS or dispatch.part_rows:
        return dispatch
    most = dispatch.num_tiles * shape.num_kv_heads
    return replace(dispatch, wide=splits.has_room_for_wide(most))


def _padded(block_tables: np.ndarray) -> mx.array:
    """[R, a power of two, 8 at least] int32."""
    num_requests, width = block_tables.shape
    table = np.zeros((num_requests, power_of_two(max(width, MIN_ELEMENTS))), np.int32)
    table[:, :width] = block_tables
    return mx.array(table)


def _shift(counts: mx.array) -> mx.array:
    """[max(R, 2), 4] int32: [R] counts in the fields of Request that are positions or lengths."""
    rows = mx.pad(counts, (0, max(0, MIN_ELEMENTS // 4 - len(counts))))
    return rows[:, None] * mx.array([0, 0, 1, 1], mx.int32)
