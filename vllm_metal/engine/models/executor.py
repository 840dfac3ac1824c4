# SPDX-License-Identifier: Apache-2.0
"""Runs a loaded model over the pool: tokens in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from metal_kernels import kernel
from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.layer_state import LayerState
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.models.compiled import CompiledForward, Graphs
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.models.table_rows import TableRows


class ModelExecutor(PagedLayers):
    """Runs a model over the pool."""

    def __init__(
        self,
        parts: ModelParts,
        layers: Sequence[StatefulLayer],
        layer_states: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        block_size: int,
        graphs: Graphs | None = None,
        variables: Callable[[ForwardInputs], object] = lambda inputs: None,
    ) -> None:
        """See PagedLayers and CompiledForward; `graphs` None allows compilation."""
        super().__init__(layers, layer_states, group_of, block_size)
        self.parts = parts
        self.table_rows = TableRows(parts.model)
        graphs = Graphs(allowed=False) if self.table_rows.follow_forward else graphs
        placed = parts.model, self.own_states, graphs or Graphs()
        self._forward = CompiledForward(self._build, *placed, variables)

    def forward_hidden(
        self, rows: Rows, block_tables: BlockTables, inputs: ForwardInputs | None = None
    ) -> mx.array:
        """Returns [T, 1, H] hidden states of the tokens, for `compute_logits`; lazy.

        `inputs` replaces those of `rows`. Read `table_rows` before they are computed.
        """
        self.begin_step()
        inputs = self.table_rows.reserve(inputs or rows.inputs)
        plans = self.plans(rows, block_tables, runs=inputs.runs)
        early = not kernel.in_graphs() or any(getattr(plan, "pace", None) for plan in plans)
        if early:
            self.table_rows.read()  # the device begins while the forward is built
        with self.table_rows.built(early):
            hidden_states, *shown = self._forward(inputs, plans, len(rows.positions_np))
        for observer in self.parts.observers:
            observer.newest, shown = shown[: observer.num_layers], shown[observer.num_layers :]
        return hidden_states

    def _build(self, inputs: ForwardInputs, plans: Sequence[object]) -> list[mx.array]:
        # CompiledForward takes one list: hidden states first, then those for the observers.
        with self.during(inputs.positions[0], plans) as caches:
            found = [self.parts.forward_hidden(inputs, caches)]
        return found + [state for observer in self.parts.observers for state in observer.newest]

    def compute_logits(self, hidden_states: mx.array) -> mx.array:
        """Returns [N, V] logits of [N, 1, H] hidden states; lazy."""
        return self.parts.compute_logits(hidden_states)

    def forward(self, rows: Rows, block_tables: BlockTables) -> mx.array:
        """Returns [N, V] logits of the tokens at `rows.logits_indices`; lazy."""
        hidden_states = self.forward_hidden(rows, block_tables)
        self.table_rows.read()
        return self.compute_logits(rows.of_logits(hidden_states))
