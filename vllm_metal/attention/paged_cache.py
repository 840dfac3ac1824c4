# SPDX-License-Identifier: Apache-2.0
"""Layer caches with full or windowed attention, answered from the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vllm_metal.attention.seam import AttendingCache
from vllm_metal.kv_cache.layer_cache import LayerKVCache


@dataclass(frozen=True)
class AttentionMetadata:
    """What a layer needs to know of one step; made fresh each step, shared by a KV cache group."""

    positions: mx.array  # [T] int32, position of each row in its request
    plan: Any  # what the layer's kind of kv_cache made of it


class PagedCache(AttendingCache):
    """Stands where mlx-lm expects one layer's KV cache.

    The model feeds T rows of length 1; `offset` gives each its own position, `update_and_fetch`
    hands K/V to the pool and `attend` is called by the seam in place of dense attention.
    """

    def __init__(self, kv_cache: LayerKVCache) -> None:
        self.kv_cache = kv_cache
        self._metadata: AttentionMetadata | None = None

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Sets the step that the following calls belong to."""
        self._metadata = metadata
        self.offset = metadata.positions  # mlx-lm rotates each row by its own

    @property
    def metadata(self) -> AttentionMetadata:
        """The step at hand.

        Raises:
            RuntimeError: no step has begun.
        """
        if self._metadata is None:
            raise RuntimeError("a paged cache was used outside a step")
        return self._metadata

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's K/V, each [T, Hkv, 1, D], and returns them as the pool holds them."""
        k, v = self.kv_cache.write(self.metadata.plan, keys[:, :, 0], values[:, :, 0])
        return mx.expand_dims(k, 2), mx.expand_dims(v, 2)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """[T, H, 1, D] queries over the request's whole context; same shape back."""
        out = self.kv_cache.attend(
            self.metadata.plan, queries[:, :, 0], keys[:, :, 0], values[:, :, 0], scale, sinks
        )
        return out[:, :, None]
