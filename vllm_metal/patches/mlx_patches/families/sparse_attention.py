# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches compute DeepSeek sparse attention, and sets its norms as transformers does.

mlx-lm's module attends to everything where the longest text of a batch has at most `index_topk`
tokens, else masks all of it, and it reads and sets the arrays of its caches. A paged cache gets the
indexer's keys, queries and weights, chooses the positions of each row by its own context, and
attends to these.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.forwards import joined
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache


def deepseek_v32(module: ModuleType) -> None:
    """Patches the attention and the indexer of DeepSeek-V3.2, which GLM-5 shares."""

    def set_epsilon(indexer: Any, args: Any) -> None:
        indexer.k_norm.eps = 1e-6  # transformers' `DeepseekV32Indexer`

    after_init(module.Indexer, set_epsilon)
    wrap(module.Indexer, "__call__", _choosing)
    wrap(module.DeepseekV32Attention, "__call__", _attending)


def _choosing(dense: Callable[..., Any]) -> Callable[..., Any]:
    def choose(self: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
        if not isinstance(cache, AttendingCache):
            return dense(self, x, qr, mask, cache)
        queries = mx.unflatten(self.wq_b(qr), -1, (self.n_heads, self.head_dim)).swapaxes(1, 2)
        keys = self.k_norm(self.wk(x))[:, None]
        queries, keys = (self.rope(rows, offset=cache.offset) for rows in (queries, keys))
        weights = self.weights_proj(x).astype(mx.float32)
        weights = weights * (self.n_heads**-0.5 * self.softmax_scale)
        return cache.choose(keys, queries, weights, self.index_topk)

    return choose


def _attending(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], AttendingCache):
            return dense(self, x, mask, cache)
        latents, index = cache
        normed = self.q_a_layernorm(self.q_a_proj(x))
        queries = mx.unflatten(self.q_b_proj(normed), -1, (self.num_heads, self.q_head_dim))
        queries, rotated = mx.split(queries.swapaxes(1, 2), [self.qk_nope_head_dim], axis=-1)
        latent, key = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        rotated = self.rope(rotated, latents.offset)
        latents.update_and_fetch(
            self.kv_a_layernorm(latent)[:, None], self.rope(key[:, None], latents.offset)
        )
        chosen = self.indexer(x, normed, None, cache=index)
        projections = self.embed_q, self.unembed_out
        out = latents.attend_chosen(queries, rotated, *projections, self.scale, chosen)
        projected: mx.array = self.o_proj(joined(out))
        return projected

    return attention
