# SPDX-License-Identifier: Apache-2.0
"""The cache that an attention layer of mlx-lm sees, answered from the paged pool."""

from __future__ import annotations

from typing import Generic

import mlx.core as mx

from vllm_metal.attention.seam import AttendingCache
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import PlanT, StepScope


class PagedCache(AttendingCache, Generic[PlanT]):
    """Stands where mlx-lm expects one layer's KV cache.

    The model feeds T rows of length 1; `offset` gives each its own position, `update_and_fetch`
    hands K/V to the pool and `attend` is called by the seam in place of dense attention.
    """

    def __init__(self, kv_cache: LayerKVCache[PlanT], scope: StepScope[PlanT]) -> None:
        """
        Args:
            kv_cache: the layer's K and V.
            scope: the step at hand; outside one, every call raises RuntimeError.
        """
        self._kv_cache = kv_cache
        self._scope = scope

    @property
    def offset(self) -> mx.array:
        """[T] int32, position of each row: mlx-lm rotates each by its own."""
        return self._scope.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's K/V, each [T, Hkv, 1, D], and returns them: `attend` needs neither."""
        self._kv_cache.write(self._scope.plan, keys[:, :, 0], values[:, :, 0])
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """[T, H, 1, D] queries over the request's whole context; same shape back."""
        return self._kv_cache.attend(self._scope.plan, queries[:, :, 0], scale, sinks)[:, :, None]
