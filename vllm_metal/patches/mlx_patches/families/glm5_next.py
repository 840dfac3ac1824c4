# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve GLM-5.3 (glm5_next), and reads its keys as transformers does.

Most layers have Kimi's linear attention, with a lower bound of decays. The others have DeepSeek's
sparse attention over latents without RoPE (see sparse_attention.py), and choose groups of
positions: an indexer stores each token's key beside gates, by whose softmax over a group a key is
pooled. Residual streams are mixed by hyper-connections, which the module computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from vllm_metal.patches.mlx_patches.families.forwards import joined
from vllm_metal.patches.mlx_patches.families.sparse_attention import check_kinds
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, GroupChoice

_LINEAR = "linear_attention"
#: Layers with an indexer, as published and as transformers names them.
_SPARSE = ("deepseek_sparse_attention", "indexed_attention")


class PooledKeyCache(KVCache):
    """The dense cache of an indexer, which keeps pooled keys of its own."""

    def __init__(self, pooled: Any) -> None:
        """`pooled`: mlx-vlm's PoolingCache."""
        super().__init__()
        self.pooled = pooled


def config(module: ModuleType) -> None:
    """Checks the layers' kinds."""
    after_init(module.TextConfig, _check)


def _check(text: Any, *_: Any, **__: Any) -> None:
    kinds = text.layer_types
    if not {*kinds} <= {_LINEAR, *_SPARSE}:
        raise ValueError(
            f"layer_types={kinds} of config.json is not supported: expected {_LINEAR!r} or "
            f"{_SPARSE[0]!r} for each of {text.num_hidden_layers} layers"
        )
    both = zip(kinds, text.indexer_types, strict=True)
    if indexers := [indexer for kind, indexer in both if kind != _LINEAR]:
        check_kinds(indexers, len(indexers))


def language(module: ModuleType) -> None:
    """Lets caches attend, choose, convolve and recur."""
    # The module's own computes two to eight tokens of a text one by one.
    module.linear = lambda layer, x: layer(x)  # type: ignore[attr-defined]
    module.gated_delta_update = _gated_delta_update  # type: ignore[attr-defined]
    module.ShortConv1d.__call__ = _convolve
    wrap(module.Glm5NextAttention, "__call__", _attending)

    def make_cache(self: Any) -> list[Any]:
        return [_cache(layer, module.PoolingCache) for layer in self.layers]

    module.LanguageModel.make_cache = make_cache


def _cache(layer: Any, pooling: Any) -> Any:
    if layer.is_linear:
        return ArraysCache(2)
    indexer = layer.self_attn.indexer
    if indexer is None:
        return CacheList(KVCache())
    return CacheList(KVCache(), PooledKeyCache(pooling(indexer.index_kpool)))


def _convolve(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    before = None if cache is None else cache[0]
    if before is None:
        before = mx.zeros((len(x), self.kernel_size - 1, x.shape[-1]), x.dtype)
    inputs = mx.concatenate([before, x], axis=1)
    if cache is not None:
        cache[0] = mx.contiguous(inputs[:, inputs.shape[1] - self.kernel_size + 1 :])
    return nn.silu(self.conv(inputs))


def _gated_delta_update(*inputs: mx.array, cache: Any = None, **options: Any) -> Any:
    """Replaces mlx-vlm's function, whose caches update themselves, by mlx-lm's."""
    update: Callable[..., Any] = gated_delta.gated_delta_update
    output, state = update(*inputs, None if cache is None else cache[1], **options)
    if cache is not None:
        cache[1] = state
    return output, state


def _attending(dense: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        self: Any, x: mx.array, mask: Any = None, cache: Any = None, prev_topk_indices: Any = None
    ) -> Any:
        if cache is None:
            return dense(self, x, mask, None, prev_topk_indices)
        own = cache[0]
        if not isinstance(own, AttendingCache):
            index = () if self.indexer is None else (cache[1], cache[1].pooled)
            return dense(self, x, mask, (own, *index, None), prev_topk_indices)
        low, latent = mx.split(self.qkv_a_proj(x), [self.q_lora_rank], axis=-1)
        normed, latent = self.q_a_layernorm(low), self.kv_a_layernorm(latent)[:, None]
        queries = mx.unflatten(self.q_b_proj(normed), -1, (self.num_heads, self.q_head_dim))
        queries = queries.swapaxes(1, 2)
        own.update_and_fetch(latent, latent[..., :0])
        chosen = prev_topk_indices
        if self.indexer is not None:
            chosen = _chosen(self.indexer, x, normed, cache[1])
        projections = self.embed_q, self.unembed_out
        out = own.attend_chosen(queries, queries[..., :0], *projections, self.scale, chosen)
        return self.o_proj(joined(out)), chosen

    return attention


def _chosen(indexer: Any, x: mx.array, normed: mx.array, cache: AttendingCache) -> Any:
    queries = mx.unflatten(indexer.wq_b(normed), -1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(x))
    gates = x.astype(mx.float32) @ indexer.index_kpool_compress_gate.T
    rows = mx.concatenate([keys, gates.astype(keys.dtype)], axis=-1)[:, None]
    weights = indexer.weights_proj(x).astype(mx.float32)
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    size = indexer.index_kpool
    pooled = partial(_pooled, indexer.index_kpool_compress_ape)
    groups = GroupChoice(size, indexer.index_topk // size, pooled)
    return cache.choose(rows, queries.swapaxes(1, 2), weights, groups)


def _pooled(by_order: mx.array, rows: mx.array) -> mx.array:
    """Returns [n, G, D] keys of [n, G, size, 2 * D] keys and gates.

    by_order: [size, D] float32, added to the gates.
    """
    keys, gates = mx.split(rows, 2, axis=-1)
    return (mx.softmax(gates + by_order, axis=2, precise=True) * keys).sum(axis=2)
