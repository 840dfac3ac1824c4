# SPDX-License-Identifier: Apache-2.0
"""A ragged batch as the model and the KV pool see it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag, RaggedRows
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionPlan
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
    def query_lens_np(self) -> np.ndarray:
        """[R] int32, tokens of each request."""
        return self.query_start_loc_np[1:] - self.query_start_loc_np[:-1]

    @property
    def inputs(self) -> ForwardInputs:
        return ForwardInputs(self.input_ids, self.positions[None])

    def of_logits(self, hidden_states: mx.array) -> mx.array:
        """Selects the tokens that need logits, [N, ...], from [T, ...]."""
        return hidden_states if self.logits_indices is None else hidden_states[self.logits_indices]


def device_positions(
    positions_np: np.ndarray, rows: RaggedRows, lag: PositionLag | None
) -> mx.array:
    """Computes exact positions on the device, [T] int32, from the host's upper bounds.

    `rows`: the tokens of the requests.
    """
    return mx.array(positions_np) if lag is None else lag.exact(positions_np, rows)


class Slots(NamedTuple):
    """Slots of a step's tokens in one KV cache group's blocks, and what is planned for them."""

    slot_mapping_np: np.ndarray  # [T] int32
    slot_mapping: mx.array | None  # [T] int32, exact; None: `slot_mapping_np` is
    attention: dict[Hashable, AttentionPlan]  # see StepLayout.share_attention

    @staticmethod
    def of(rows: Rows, tables_np: np.ndarray, block_size: int) -> Slots:
        """Computes the slots of `rows`; `tables_np` is [R, W] int32, blocks of each request."""
        of_requests = RaggedRows.of(rows.query_lens_np)
        places_np, offsets_np = np.divmod(rows.positions_np, np.int32(block_size))
        slots_np = tables_np[of_requests.groups_np, places_np] * block_size + offsets_np
        if rows.lag is None:
            return Slots(slots_np, None, {})
        places, offsets = mx.divmod(rows.positions, block_size)
        slots = mx.array(tables_np)[of_requests.groups, places] * block_size + offsets
        return Slots(slots_np, slots, {})


class NewestSlots:
    """The slots computed last, by KV cache group.

    A drafter's pass over a block often has the tokens that the target's step then verifies.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[tuple[object, ...], PositionLag | None, Slots]] = {}

    def of(self, rows: Rows, tables_np: np.ndarray, block_size: int, group: int) -> Slots:
        """Returns `Slots.of`, computed anew only for other tokens or blocks than the last."""
        starts_np, positions_np = rows.query_start_loc_np, rows.positions_np
        arrays = starts_np.tobytes(), positions_np.tobytes(), tables_np.tobytes()
        key = (block_size, *arrays)
        before = self._found.get(group)
        # An equal lag is the same object: its counts are on the device.
        if before is None or before[0] != key or before[1] is not rows.lag:
            self._found[group] = before = key, rows.lag, Slots.of(rows, tables_np, block_size)
        return before[2]


def step_layout(
    rows: Rows,
    block_table_np: np.ndarray,
    block_size: int,
    pace: Pace | None,
    group: int = 0,
    earlier_slots_np: np.ndarray | None = None,
    runs: tuple[Run, ...] = (),
    newest: NewestSlots | None = None,
) -> StepLayout:
    """Maps the tokens to slots of one KV cache group's blocks; -1 for tokens that are not stored.

    `block_table_np` is [max_num_reqs, max_blocks] int32, by req_idx. Without `pace`, MLX decides
    where command buffers end. `earlier_slots_np` and `runs`: see StepLayout. `newest`: of all
    networks over these blocks.
    """
    # Cut to the longest context, so that a step's cost depends on its actual content.
    width = -(-int(rows.seq_lens_np.max()) // block_size)
    tables = block_table_np[rows.req_indices_np, :width]
    slots = (newest or NewestSlots()).of(rows, tables, block_size, group)
    slot_mapping_np, slot_mapping, attention = slots
    if rows.stored_np is not None:
        slot_mapping_np = np.where(rows.stored_np, slot_mapping_np, np.int32(-1))
        if slot_mapping is not None:
            slot_mapping = mx.where(mx.array(rows.stored_np), slot_mapping, -1)
    layout = StepLayout(
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
    layout.share_attention(attention)
    return layout
