# SPDX-License-Identifier: Apache-2.0
"""Passes paged caches to layers that attend to K and V of other layers.

mlx-lm's modules pass arrays. A paged cache represents its own K and V, so the layers get the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from vllm_metal.patches.mlx_patches.families.forwards import attend, joined, offset_of
from vllm_metal.patches.mlx_patches.seam import AttendingCache


def afm7(module: ModuleType) -> None:
    """Makes layers without their own K take positions from the paged cache."""

    def call(self: Any, x: mx.array, keys: Any, values: Any, mask: Any = None) -> mx.array:
        paged = isinstance(keys, AttendingCache)
        offset = keys.offset if paged else keys.shape[2] - x.shape[1]
        queries = mx.unflatten(self.q_proj(x), -1, (self.n_heads, -1)).swapaxes(1, 2)
        queries = self.q_norm(self.rope(queries, offset=offset))
        return attend(queries, keys, values, self.scale, None, mask, self.out_proj)

    module.KVReuseAttention.__call__ = call


def iquestloopcoder(module: ModuleType) -> None:
    """Makes the second pass over the layers read K and V from the first pass's cache."""

    def forward(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        count = len(self.layers)
        caches = [None] * (2 * count) if cache is None else cache
        hidden = self.embed_tokens(inputs)
        mask = create_attention_mask(hidden, caches[0])
        near = create_attention_mask(hidden, caches[count], window_size=self.loop_window_size)
        first: list[tuple[Any, Any]] = []
        for layer, of_layer in zip(self.layers, caches[:count], strict=True):
            queries, *kept = _project(layer, hidden, of_layer)
            first.append((kept[0], kept[1]))
            out = layer.self_attn.attention(queries, *kept, mask, cache=of_layer)
            hidden = _finish_layer(layer, hidden, out)
        whole = zip(first, caches[:count], strict=True)
        for layer, gating, of_layer, (of_pass, of_first) in zip(
            self.layers, self.gate_projections, caches[count:], whole, strict=True
        ):
            queries, *own = _project(layer, hidden, of_layer)
            attention, gate = layer.self_attn.attention, gating(queries)
            far = attention(queries, *of_pass, mask, cache=of_first)
            out = attention(queries, *own, near, cache=of_layer)
            hidden = _finish_layer(layer, hidden, module._mix_attention(gate, far, out))
        normed: mx.array = self.norm(hidden)
        return normed

    module.IQuestLoopCoderModel.__call__ = forward


def _project(layer: Any, hidden: mx.array, cache: Any) -> tuple[mx.array, Any, Any]:
    """Returns this step's queries, and the cache's keys and values."""
    normed = layer.input_layernorm(hidden)
    queries, keys, values = layer.self_attn.get_qkv(normed, offset_of(cache))
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    return queries, keys, values


def _finish_layer(layer: Any, hidden: mx.array, out: mx.array) -> mx.array:
    """Computes the rest of a layer from its attention's [B, heads, L, D]; returns [B, L, H]."""
    hidden = hidden + layer.self_attn.o_proj(joined(out))
    after: mx.array = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return after
