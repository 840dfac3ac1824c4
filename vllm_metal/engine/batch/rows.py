# SPDX-License-Identifier: Apache-2.0
"""A ragged batch as the model and the KV pool see it."""

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
    """T tokens of R requests by position; those of request r start at query_start_loc_np[r].

    With `lag`, `seq_lens_np` and `positions_np` are upper bounds.
    """

    req_indices_np: np.ndarray  # [R] int32
    query_start_loc_np: np.ndarray  # [R + 1] int32
    seq_lens_np: np.ndarray  # [R] int32, context including these rows
    positions_np: np.ndarray  # [T] int32
    positions: mx.array  # [T] int32
    input_ids: mx.array  # [T] int32, on the device
    logits_indices: mx.array | None  # [N] int32, rows that need logits; None: all
    num_drafts_np: np.ndarray | None = None  # [R] int32, drafts at a request's end; None: no drafts
    lag: PositionLag | None = None  # None: the host's positions are exact
    stored_np: np.ndarray | None = None  # [T] bool, rows with K/V to store; None: all

    @property
    def inputs(self) -> ForwardInputs:
        return ForwardInputs(self.input_ids, self.positions[None])

    def of_logits(self, hidden_states: mx.array) -> mx.array:
        """Selects the tokens that need logits, [N, ...], from [T, ...]."""
        return hidden_states if self.logits_indices is None else hidden_states[self.logits_indices]


def device_positions(
    positions_np: np.ndarray, requests_np: np.ndarray, lag: PositionLag | None
) -> mx.array:
    """Computes exact positions on the device, [T] int32, from the host's upper bounds.

    `requests_np`, [T], is each token's request.
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
    """Maps the tokens to slots of one KV cache group's blocks; -1 for tokens that are not stored.

    `block_table_np` is [max_num_reqs, max_blocks] int32, by req_idx. Without `pace`, MLX decides
    where command buffers end. `earlier_slots_np` and `runs`: see StepLayout.
    """
    # Cut to the longest context, so that a step's cost depends on its actual content.
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
