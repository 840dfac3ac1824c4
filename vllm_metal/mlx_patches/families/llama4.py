# SPDX-License-Identifier: Apache-2.0
"""Llama 4 in texts of one chunk of its attention, where chunks are the whole context.

Most layers see the chunk of `attention_chunk_size` positions that a token is in, and no other: the
pool has no blocks of that kind.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from vllm_metal.mlx_patches.families.attention import attend, joined, temperatures
from vllm_metal.models.weight_files import ModelLoadError


def llama4(module: ModuleType) -> None:
    """Layers over the whole context, and factors of the queries by each row's position."""

    def make_cache(self: Any) -> list[Any]:
        return [KVCache() for _ in self.layers]

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden = self.embed_tokens(inputs)
        caches = [None] * len(self.layers) if cache is None else cache
        mask = create_attention_mask(hidden, caches[0])
        for layer, of_layer in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, mask, cache=of_layer)
        normed: mx.array = self.norm(hidden)
        return normed

    module.Model.make_cache = make_cache
    module.LlamaModel.__call__ = forward
    module.Attention.__call__ = _attention


def _attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    queries, keys, values = (
        mx.unflatten(projected, -1, (count, -1)).swapaxes(1, 2)
        for projected, count in (
            (self.q_proj(x), self.n_heads),
            (self.k_proj(x), self.n_kv_heads),
            (self.v_proj(x), self.n_kv_heads),
        )
    )
    offset = 0 if cache is None else cache.offset
    if self.use_rope:
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
    if self.use_qk_norm:
        queries, keys = (mx.fast.rms_norm(heads, None, 1e-6) for heads in (queries, keys))
    if self.attn_temperature_tuning and not self.use_rope:
        factors = temperatures(offset, x.shape[1], self.floor_scale, self.attn_scale)
        queries = (queries * factors).astype(queries.dtype)
    out: mx.array = self.o_proj(joined(attend(queries, keys, values, self.scale, cache, mask)))
    return out


def check_context(model: nn.Module, max_model_len: int) -> None:
    """
    Args:
        model: of any family.
        max_model_len: tokens of the longest text.

    Raises:
        ModelLoadError: a text may be longer than a chunk of the model's attention.
    """
    text: Any = getattr(getattr(model, "args", None), "text_config", None)
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and max_model_len > chunk:
        raise ModelLoadError(
            f"attention_chunk_size of config.json is {chunk}: layers that see such chunks of a "
            f"text are served in texts of one chunk only, so set --max-model-len to {chunk} or less"
        )
