# SPDX-License-Identifier: Apache-2.0
"""Plans how a step's rows attend, once per step for each shape and window of layers."""

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
from metal_kernels.paged_attention.shared import shared_prefixes
from metal_kernels.paged_attention.splits import DEFAULT, MOST_FIXED_ROWS, Splits
from metal_kernels.paged_attention.tiles import WIDE_ROWS, Tiles, power_of_two


@dataclass(frozen=True)
class AttentionPlan:
    """Attention of a step's rows, for all layers that share a block table, shape and window."""

    shape: AttentionShape
    num_tokens: int  # T
    dispatches: tuple[Dispatch, ...]
    block_tables: mx.array  # [R, W] int32, W a power of two of at least 8
    order: mx.array | None  # [T] int32, position of row t in the dispatches' outputs; None: t
    extent: int | None = None  # distances that have a relative bias; None: no bias
    bidirectional: bool = False  # whether rows of a request see those after them, too

    @property
    def work(self) -> int:
        """FLOPs per layer."""
        return sum(launch.work for dispatch in self.dispatches for launch in dispatch.launches)

    @property
    def seeing_later_rows(self) -> AttentionPlan | None:
        """This plan for rows that also see later rows of their request; None: the tiles differ."""
        if not all(dispatch.in_one_tile for dispatch in self.dispatches):
            return None
        return replace(self, bidirectional=True)

    @property
    def pipelines(self) -> tuple[tuple[bool, int, bool, bool], ...]:
        """Pipelines that a layer launches, each as (decode, rows, split, wide)."""
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
    bidirectional: bool = False,
    extent: int | None = None,
) -> AttentionPlan:
    """Divides R requests' rows into tiles.

    Args:
        query_start_loc: [R + 1] int32, first batch row of each request.
        seq_lens: [R] int32, context of each request including this step's rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        shape: heads and head sizes of the layers.
        window: a query at position p sees positions (p - window, p]; None: [0, p].
        tiles: tile sizes to choose from, at least one; None: all.
        most_work: limit of FLOPs of a dispatch; more tiles are spread over several.
        lag: upper bounds minus actual values of `seq_lens` and positions; None: zero.
        splits: how contexts are split, if `tiles` allows it.
        block_size: tokens per block. If given, decodes read a shared prefix once, unless parts have
            a fixed length, or there is a bias.
        bidirectional: rows of a request also see its rows after them.
        extent: distances that have a relative bias, see `op.run`; None: there is no bias.
    """
    tiles = tiles or Tiles.for_layer(shape, window)
    batch = Batch.of(query_start_loc, seq_lens, shape, window, lag, bidirectional)
    packed = batch.query_lens * shape.group
    kinds = _kinds(packed, shape, tiles, splits)
    dispatches, pieces = [], []
    for decode, members in kinds:
        sizes, most = tiles.decode if decode else tiles.prefill, packed[members].max()
        rows = next((size for size in sizes if size >= most), sizes[-1])
        for piece in batch.pieces(members, rows, most_work):
            common = None
            # The pass over a shared prefix lacks the rows' positions, which a relative bias needs.
            shares = block_size is not None and splits.fixed is None and extent is None
            if decode and shares:
                assert block_size is not None
                common = shared_prefixes(batch, piece, rows, tiles, block_tables, block_size)
            made = dispatch_of(decode, rows, batch, piece, splits if tiles.split else None, common)
            dispatches.append(_widen(made, shape, tiles, splits))
            pieces.append(piece)
    return AttentionPlan(
        shape=shape,
        num_tokens=int(query_start_loc[-1]),
        dispatches=tuple(dispatches),
        block_tables=_pad_tables(block_tables),
        order=output_order(batch, pieces) if len(kinds) > 1 else None,
        extent=extent,
        bidirectional=bidirectional,
    )


def _kinds(
    packed: np.ndarray, shape: AttentionShape, tiles: Tiles, splits: Splits
) -> list[tuple[bool, np.ndarray]]:
    """Assigns requests to the decode (True) and the prefill kernel; `packed`: [R] packed rows."""
    if not tiles.decode or not tiles.prefill:
        decodes = np.full(len(packed), bool(tiles.decode))
    else:
        decodes = packed <= tiles.decode[-1] * (shape.decode_rows // shape.decode_tile_rows)
        if splits.fixed is not None:
            # Only by the row's own arithmetic, if need be in several tiles.
            decodes |= packed <= MOST_FIXED_ROWS * shape.group
    kinds = (True, np.flatnonzero(decodes)), (False, np.flatnonzero(~decodes))
    return [(decode, members) for decode, members in kinds if len(members)]


def _widen(dispatch: Dispatch, shape: AttentionShape, tiles: Tiles, splits: Splits) -> Dispatch:
    """Makes a decode dispatch use 512 threads per threadgroup if tiles and GPU have room for it."""
    if not (tiles.wide and dispatch.decode) or dispatch.rows != WIDE_ROWS or dispatch.part_rows:
        return dispatch
    most = dispatch.num_tiles * shape.num_kv_heads
    return replace(dispatch, wide=splits.has_room_for_wide(most))


def _pad_tables(block_tables: np.ndarray) -> mx.array:
    """Pads tables to a width that is a power of two, at least 8; returns int32."""
    num_requests, width = block_tables.shape
    table = np.zeros((num_requests, power_of_two(max(width, MIN_ELEMENTS))), np.int32)
    table[:, :width] = block_tables
    return mx.array(table)
