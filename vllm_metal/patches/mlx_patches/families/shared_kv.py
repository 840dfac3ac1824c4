# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to K and V of other layers.

mlx-lm's modules hand them arrays. A paged cache stands for its K and V itself, so the layers are
told where those come from.
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
    """Positions of layers that have no K of their own, where no length tells them."""

    def call(self: Any, x: mx.array, keys: Any, values: Any, mask: Any = None) -> mx.array:
        paged = isinstance(keys, AttendingCache)
        offset = keys.offset if paged else keys.shape[2] - x.shape[1]
        queries = mx.unflatten(self.q_proj(x), -1, (self.n_heads, -1)).swapaxes(1, 2)
        queries = self.q_norm(self.rope(queries, offset=offset))
        return attend(queries, keys, values, self.scale, None, mask, self.out_proj)

    module.KVReuseAttention.__call__ = call


def iquestloopcoder(module: ModuleType) -> None:
    """The second pass over the layers attends to K and V of the first one by that one's cache."""

    def forward(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        count = len(self.layers)
        caches = [None] * (2 * count) if cache is None else cache
        hidden = self.embed_tokens(inputs)
        mask = create_attention_mask(hidden, caches[0])
        near = create_attention_mask(hidden, caches[count], window_size=self.loop_window_size)
        first: list[tuple[Any, Any]] = []
        for layer, of_layer in zip(self.layers, caches[:count], strict=True):
            queries, *kept = _projected(layer, hidden, of_layer)
            first.append((kept[0], kept[1]))
            out = layer.self_attn.attention(queries, *kept, mask, cache=of_layer)
            hidden = _rest(layer, hidden, out)
        whole = zip(first, caches[:count], strict=True)
        for layer, gating, of_layer, (of_pass, of_first) in zip(
            self.layers, self.gate_projections, caches[count:], whole, strict=True
        ):
            queries, *own = _projected(layer, hidden, of_layer)
            attention, gate = layer.self_attn.attention, gating(queries)
            far = attention(queries, *of_pass, mask, cache=of_first)
            out = attention(queries, *own, near, cache=of_layer)
            hidden = _rest(layer, hidden, module._mix_attention(gate, far, out))
        normed: mx.array = self.norm(hidden)
        return normed

    module.IQuestLoopCoderModel.__call__ = forward


def _projected(layer: Any, hidden: mx.array, cache: Any) -> tuple[mx.array, Any, Any]:
    """Queries of this step; keys and values of all."""
    normed = layer.input_layernorm(hidden)
    queries, keys, values = layer.self_attn.get_qkv(normed, offset_of(cache))
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    return queries, keys, values


def _rest(layer: Any, hidden: mx.array, out: mx.array) -> mx.array:
    """[B, L, H] after the layer, of [B, heads, L, D] that its attention gave."""
    hidden = hidden + layer.self_attn.o_proj(joined(out))
    after: mx.array = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return after
