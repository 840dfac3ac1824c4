# SPDX-License-Identifier: Apache-2.0
"""A ragged batch as a model and the KV pool see it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from metal_kernels.pace import Pace
from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.kv_cache.layer_state import Run, StepLayout


@dataclass(frozen=True, kw_only=True)
class Rows:
    """T rows of R requests; request r owns rows query_start_loc[r : r + 2], by position.

    Where `behind` is there, `seq_lens_np` and `positions_np` are upper bounds.
    """

    req_indices_np: np.ndarray  # [R] int32
    query_start_loc_np: np.ndarray  # [R + 1] int32
    seq_lens_np: np.ndarray  # [R] int32, context including these rows
    positions_np: np.ndarray  # [T] int32
    positions: mx.array  # [T] int32
    input_ids: mx.array  # [T] int32, on the device
    logits_indices: mx.array | None  # [N] int32, rows to compute logits of; None: all
    num_drafts_np: np.ndarray | None = None  # [R] int32, drafts at a request's end; None: no drafts
    lag: PositionLag | None = None  # None: the host's positions are exact
    stored_np: np.ndarray | None = None  # [T] bool, rows whose K/V are kept; None: all

    @property
    def inputs(self) -> ForwardInputs:
        """What a model reads of the rows."""
        return ForwardInputs(self.input_ids, self.positions[None])

    def of_logits(self, hidden_states: mx.array) -> mx.array:
        """[N, ...] of [T, ...]: the rows of which logits are wanted."""
        return hidden_states if self.logits_indices is None else hidden_states[self.logits_indices]


def device_positions(
    positions_np: np.ndarray, requests_np: np.ndarray, lag: PositionLag | None
) -> mx.array:
    """[T] int32, where rows lie.

    Args:
        positions_np: [T] int32, where the host has them.
        requests_np: [T] int, which request of the batch each row belongs to.
        behind: of these requests; None: the host's positions are exact.
    """
    positions = mx.array(positions_np)
    return positions if lag is None else positions - lag.counts[mx.array(requests_np)]


def step_layout(
    rows: Rows,
    block_table_np: np.ndarray,
    block_size: int,
    pace: Pace | None,
    group: int = 0,
    earlier_slots_np: np.ndarray | None = None,
    runs: tuple[Run, ...] = (),
) -> StepLayout:
    """Where the rows lie in one KV cache group's blocks; those that are not kept: at slot -1.

    Args:
        rows: the batch.
        block_table_np: [max_num_reqs, max_blocks] int32, the group's table by req_idx.
        block_size: tokens of a block.
        pace: of the network; None: MLX ends command buffers.
        group: the group.
        earlier_slots_np, runs: see StepLayout.
    """
    # Narrowed to the longest context, so that a step's cost follows what it really holds.
    width = -(-int(rows.seq_lens_np.max()) // block_size)
    tables = block_table_np[rows.req_indices_np, :width]
    requests = np.repeat(np.arange(len(rows.req_indices_np)), np.diff(rows.query_start_loc_np))
    blocks = tables[requests, rows.positions_np // block_size]
    slot_mapping_np = blocks * block_size + rows.positions_np % block_size
    slot_mapping = None
    if rows.lag is not None:
        pages, offsets = mx.divmod(rows.positions, block_size)
        slot_mapping = mx.array(tables)[mx.array(requests), pages] * block_size + offsets
    if rows.stored_np is not None:
        slot_mapping_np = np.where(rows.stored_np, slot_mapping_np, np.int32(-1))
        if slot_mapping is not None:
            slot_mapping = mx.where(mx.array(rows.stored_np), slot_mapping, -1)
    return StepLayout(
        query_start_loc_np=rows.query_start_loc_np,
        seq_lens_np=rows.seq_lens_np,
        block_tables_np=tables,
        slot_mapping_np=slot_mapping_np,
        block_size=block_size,
        req_indices_np=rows.req_indices_np,
        num_drafts_np=rows.num_drafts_np,
        pace=pace,
        lag=rows.lag,
        slot_mapping=slot_mapping,
        group=group,
        earlier_slots_np=earlier_slots_np,
        runs=runs,
    )
