# SPDX-License-Identifier: Apache-2.0
"""A loaded model with its paged caches: rows in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.batch.requests import BlockTables
from vllm_metal.batch.rows import Rows
from vllm_metal.kv_cache.layer_state import LayerState, StatefulLayer
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.models.parts import SelectedRows


class ModelExecutor(PagedLayers):
    """Runs a model over the pool."""

    def __init__(
        self,
        model: nn.Module,
        selected: SelectedRows,
        layers: Sequence[StatefulLayer],
        layer_states: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        block_size: int,
    ) -> None:
        """
        Args:
            model: an mlx-lm model.
            selected: its row selection, made once per model.
            layers, layer_states, group_of, block_size: see PagedLayers.
        """
        super().__init__(layers, layer_states, group_of, block_size)
        self._model = model
        self._head_rows = selected

    def forward(self, rows: Rows, block_tables: BlockTables) -> mx.array:
        """[N, V] logits of the rows' `logits_indices`, not yet computed."""
        with self.step(rows, block_tables) as caches:
            return self._head_rows.logits(self._model, rows.input_ids, caches, rows.logits_indices)

    def states(self, rows: Rows, block_tables: BlockTables) -> mx.array:
        """[T, 1, H] states of all the rows, for `head`; not yet computed."""
        with self.step(rows, block_tables) as caches:
            return self._head_rows.states(self._model, rows.input_ids, caches)

    def head(self, states: mx.array) -> mx.array:
        """[N, V] logits of N rows of `states`, not yet computed."""
        return self._head_rows.head(self._model, states)
