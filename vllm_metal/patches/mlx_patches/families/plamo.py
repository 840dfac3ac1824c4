# SPDX-License-Identifier: Apache-2.0
"""Adapts attention of three PLaMo generations to the paged cache.

PLaMo 13B orders query heads differently: head h reads K/V head h modulo their number. PLaMo 2 calls
MLX's attention directly instead of the function that mlx-lm's other modules call. PLaMo 3's mask
shows one position more than its window, which mlx-lm's own cache has dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from vllm_metal.patches.mlx_patches.families.forwards import attend, heads, joined, offset_of
from vllm_metal.patches.mlx_patches.replacing import wrap


def plamo(module: ModuleType) -> None:
    """Reorders PLaMo 13B's query heads by K/V head during attention."""

    def call(
        self: Any, hidden_states: mx.array, attention_mask: Any = None, cache: Any = None
    ) -> mx.array:
        def project(mixed: mx.array) -> mx.array:
            per_head = mx.unflatten(mixed, -1, (-1, self.v_dim)).swapaxes(1, 2)
            reordered = joined(_reordered(per_head, self.q_num_heads // self.k_num_heads))
            projected: mx.array = self.o_proj(reordered)
            return projected

        queries, keys, values = heads(self, hidden_states, self.qk_dim)
        offset = offset_of(cache)
        queries = _reordered(self.rotary_emb(queries, offset=offset), self.k_num_heads)
        keys = self.rotary_emb(keys, offset=offset)
        return attend(queries, keys, values, self.scale, cache, attention_mask, project)

    module.Attention.__call__ = call


def _reordered(heads: mx.array, inner: int) -> mx.array:
    """Reorders [B, H, L, D] by heads' index within groups of `inner` heads, then by group."""
    return mx.unflatten(heads, 1, (-1, inner)).swapaxes(1, 2).flatten(1, 2)


def plamo2(module: ModuleType) -> None:
    """Makes PLaMo 2 call the attention function that mlx-lm's other modules call."""

    def call(self: Any, hidden_states: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        ends = [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim]
        queries, keys, values = (
            mx.unflatten(part, -1, (-1, self.qk_dim)).swapaxes(1, 2)
            for part in mx.split(self.qkv_proj(hidden_states), ends, axis=-1)
        )
        offset = offset_of(cache)
        queries = self.rope(_normed(queries, self.q_weight), offset=offset)
        keys = self.rope(_normed(keys, self.k_weight), offset=offset)
        return attend(queries, keys, values, self.scale, cache, mask, self.o_proj)

    module.Attention.__call__ = call


def _normed(heads: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(heads, None, 1e-6) * weight[:, None]


def plamo3(module: ModuleType) -> None:
    """Makes PLaMo 3's caches one position larger than its window, as its mask is."""

    def with_windows(before: Callable[..., Any]) -> Callable[..., Any]:
        def make_cache(self: Any) -> list[Any]:
            return [
                RotatingKVCache(max_size=self.config.window_size + 1)
                if isinstance(cache, RotatingKVCache)
                else cache
                for cache in before(self)
            ]

        return make_cache

    wrap(module.Model, "make_cache", with_windows)
