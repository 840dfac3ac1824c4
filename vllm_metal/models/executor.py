# SPDX-License-Identifier: Apache-2.0
"""A loaded model with its paged caches: an InputBatch in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.attention.paged_cache import PagedCache
from vllm_metal.inputs import InputBatch, attention_metadata
from vllm_metal.kv_cache.pool import Region
from vllm_metal.models.loader import SelectedRows
from vllm_metal.requests import BlockTables

if TYPE_CHECKING:
    from vllm_metal.models.layers import AttentionLayer


class ModelExecutor:
    """Runs the model over the pool; owns the layer caches."""

    def __init__(
        self,
        model: nn.Module,
        rows: SelectedRows,
        layers: Sequence[AttentionLayer],
        regions: Mapping[str, Region],
        group_of: Mapping[str, int],
        block_size: int,
    ) -> None:
        """
        Args:
            model: an mlx-lm model.
            rows: its row selection, made once per model.
            layers: its attention layers, in the order of its caches.
            regions: pool region by layer name.
            group_of: KV cache group by layer name.
            block_size: tokens of a block.
        """
        self._model = model
        self._rows = rows
        self._block_size = block_size
        self._caches = [PagedCache(regions[layer.name]) for layer in layers]
        self._regions = list(dict.fromkeys(regions.values()))
        # Layers that share a block table and a window share a step's metadata.
        self._kinds: dict[tuple[int, int | None], list[PagedCache]] = {}
        for layer, cache in zip(layers, self._caches, strict=True):
            self._kinds.setdefault((group_of[layer.name], layer.window), []).append(cache)

    def forward(self, batch: InputBatch, block_tables: BlockTables) -> mx.array:
        """[N + prompt rows, V] logits of the batch's `logits_indices`, not yet computed."""
        for region in self._regions:
            region.flush()
        for (group, window), caches in self._kinds.items():
            metadata = attention_metadata(
                batch, block_tables.tables_np[group], self._block_size, window
            )
            for cache in caches:
                cache.begin_step(metadata)
        return self._rows.logits(self._model, batch.input_ids, self._caches, batch.logits_indices)

    def pool_arrays(self) -> list[mx.array]:
        """The pool as it stands, for whoever must wait for it or measure it."""
        return [array for region in self._regions for array in (region.keys, region.values)]
