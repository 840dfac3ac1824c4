# SPDX-License-Identifier: Apache-2.0
"""A loaded model with its paged caches: rows in, logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape
from vllm_metal.batch.requests import BlockTables
from vllm_metal.batch.rows import Rows, step_layout
from vllm_metal.kv_cache.layer_cache import LayerKVCache, StepLayout
from vllm_metal.attention.paged_cache import AttentionMetadata, PagedCache
from vllm_metal.models.parts import SelectedRows

if TYPE_CHECKING:
    from vllm_metal.attention.layers import AttentionLayer


class PagedLayers:
    """The layer caches of one network, told of each step together."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        kv_caches: Mapping[str, LayerKVCache],
        group_of: Mapping[str, int],
        block_size: int,
    ) -> None:
        """
        Args:
            layers: the network's attention layers, in the order of its caches.
            kv_caches: layer cache by layer name; those of other networks are looked after, too.
            group_of: KV cache group by layer name.
            block_size: tokens of a block.
        """
        self._block_size = block_size
        self._pace = Pace()
        self._caches = [PagedCache(kv_caches[layer.name]) for layer in layers]
        self._kv_caches = list(dict.fromkeys(kv_caches.values()))
        self._kv_cache_type = type(self._kv_caches[0])
        # Layers that share a block table, shape and window share a step's metadata.
        self._kinds: dict[tuple[int, AttentionShape, int | None], list[PagedCache]] = {}
        for layer, cache in zip(layers, self._caches, strict=True):
            kind = (group_of[layer.name], layer.shape, layer.window)
            self._kinds.setdefault(kind, []).append(cache)

    @property
    def pipelined(self) -> bool:
        """Whether a step may be handed to the device while the one before still runs."""
        return self._kv_cache_type.pipelined

    def update_blocks(self, zeroed: Sequence[int], copied: Sequence[tuple[int, int]]) -> None:
        """What the scheduler wants of whole blocks before the next forward.

        Args:
            zeroed: blocks to clear.
            copied: (source, target) blocks to copy after that.
        """
        for kv_cache in self._kv_caches:
            kv_cache.begin_step()
            if zeroed:
                kv_cache.clear_blocks(np.array(zeroed, np.int32))
            if copied:
                sources, targets = np.array(copied, np.int32).T
                kv_cache.copy_blocks(sources, targets)

    def begin_step(self, rows: Rows, block_tables: BlockTables) -> list[PagedCache]:
        """The layers' caches, ready for a forward of these rows."""
        for kv_cache in self._kv_caches:
            kv_cache.begin_step()
        layouts: dict[int, StepLayout] = {}
        for (group, shape, window), caches in self._kinds.items():
            if group not in layouts:
                table_np = block_tables.tables_np[group]
                layouts[group] = step_layout(rows, table_np, self._block_size, self._pace)
            plan = self._kv_cache_type.plan(layouts[group], shape, window)
            metadata = AttentionMetadata(rows.positions, plan)
            for cache in caches:
                cache.begin_step(metadata)
        return self._caches

    def pool_arrays(self) -> list[mx.array]:
        """The pool as it stands, for whoever must wait for it or measure it."""
        return [array for kv_cache in self._kv_caches for array in kv_cache.arrays]


class ModelExecutor(PagedLayers):
    """Runs a model over the pool."""

    def __init__(
        self,
        model: nn.Module,
        selected: SelectedRows,
        layers: Sequence[AttentionLayer],
        kv_caches: Mapping[str, LayerKVCache],
        group_of: Mapping[str, int],
        block_size: int,
    ) -> None:
        """
        Args:
            model: an mlx-lm model.
            selected: its row selection, made once per model.
            layers, kv_caches, group_of, block_size: see PagedLayers.
        """
        super().__init__(layers, kv_caches, group_of, block_size)
        self._model = model
        self._head_rows = selected

    def forward(self, rows: Rows, block_tables: BlockTables) -> mx.array:
        """[N, V] logits of the rows' `logits_indices`, not yet computed."""
        caches = self.begin_step(rows, block_tables)
        return self._head_rows.logits(self._model, rows.input_ids, caches, rows.logits_indices)

    def states(self, rows: Rows, block_tables: BlockTables) -> mx.array:
        """[T, 1, H] states of all the rows, for `head`; not yet computed."""
        caches = self.begin_step(rows, block_tables)
        return self._head_rows.states(self._model, rows.input_ids, caches)

    def head(self, states: mx.array) -> mx.array:
        """[N, V] logits of N rows of `states`, not yet computed."""
        return self._head_rows.head(self._model, states)
