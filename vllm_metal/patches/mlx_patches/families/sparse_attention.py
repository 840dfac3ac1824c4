# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches compute DeepSeek sparse attention, and corrects it as transformers has it.

mlx-lm's module attends to everything where the longest text of a batch has at most `index_topk`
tokens, else masks all of it, and it reads and sets the arrays of its caches. A paged cache gets the
indexer's keys, queries and weights, chooses the positions of each row by its own context, and
attends to these.

Layers without an indexer of their own attend to the positions that the last one before them has
chosen in the same forward (`GlmMoeDsaAttention` of transformers). mlx-lm's module has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

from vllm_metal.patches.mlx_patches.families.forwards import joined
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache

_FULL, _SHARED = "full", "shared"


class _NoKeys(NamedTuple):
    """Replaces the cache of an indexer that a layer does not have."""

    keys: mx.array
    values: mx.array


@dataclass
class _Choice:
    """The newest positions that an indexer of the running forward has chosen."""

    newest: Any = None


class _SharedIndexer(nn.Module):
    """Returns what the indexer of an earlier layer has chosen."""

    def __init__(self, choice: _Choice) -> None:
        super().__init__()
        self._choice = choice

    def __call__(self, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
        return self._choice.newest


def deepseek_v32(module: ModuleType) -> None:
    """Patches the attention and the indexer of DeepSeek-V3.2, which GLM-5 shares."""

    def set_epsilon(indexer: Any, args: Any) -> None:
        indexer.k_norm.eps = 1e-6  # transformers' `DeepseekV32Indexer`

    after_init(module.Indexer, set_epsilon)
    wrap(module.Indexer, "__call__", choosing)
    wrap(module.DeepseekV32Attention, "__call__", _attending)
    wrap(module.DeepseekV32Model, "__call__", _forgetting)


def glm_moe_dsa(module: ModuleType) -> None:
    """Adds layers that share an earlier one's choice of positions."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        indexer_types: list[str] | None = None
        index_topk_pattern: str | list[str] | None = None
        index_topk_freq: int = 1
        index_skip_topk_offset: int = 2

        def __post_init__(self) -> None:
            super().__post_init__()
            self.indexer_types = self.indexer_types or _kinds(self)
            check_kinds(self.indexer_types, self.num_hidden_layers)

    def share(model: Any, args: Any) -> None:
        choice = _Choice()
        for layer, kind in zip(model.layers, args.indexer_types, strict=True):
            if kind == _SHARED:
                layer.self_attn.indexer = _SharedIndexer(choice)
            else:
                layer.self_attn.indexer.choice = choice
        model.model.choice = choice

    def make_cache(self: Any) -> list[Any]:
        return [
            CacheList(KVCache()) if _is_shared(layer) else CacheList(KVCache(), KVCache())
            for layer in self.layers
        ]

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]
    after_init(module.Model, share)
    module.Model.make_cache = make_cache


def check_kinds(kinds: list[str], num_layers: int) -> None:
    """Raises ValueError if a layer would have neither an indexer nor one to share."""
    known = {*kinds} <= {_FULL, _SHARED} and len(kinds) == num_layers
    if not known or kinds[0] != _FULL:
        raise ValueError(
            f"indexer_types of config.json: expected {_FULL!r} for the first sparse layer and "
            f"{_FULL!r} or {_SHARED!r} for each of the {num_layers} layers"
        )


def _kinds(args: Any) -> list[str]:
    """Returns the layers' kinds of indexers where config.json does not list them.

    As `GlmMoeDsaConfig` of transformers derives them.
    """
    if (pattern := args.index_topk_pattern) is not None:
        letters = {"F": _FULL, "S": _SHARED}
        return [letters.get(kind, kind) for kind in pattern]
    every, first = max(args.index_topk_freq, 1), args.index_skip_topk_offset
    layers = range(args.num_hidden_layers)
    return [_SHARED if max(index - first + 1, 0) % every else _FULL for index in layers]


def _is_shared(layer: Any) -> bool:
    return isinstance(layer.self_attn.indexer, _SharedIndexer)


def _forgetting(forward: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Drops the choice at the end of a forward: it would keep the forward's arrays."""

    def call(self: Any, *args: Any, **options: Any) -> mx.array:
        try:
            return forward(self, *args, **options)
        finally:
            if (choice := getattr(self, "choice", None)) is not None:
                choice.newest = None

    return call


def choosing(dense: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a paged cache choose positions for an indexer."""

    def choose(self: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> Any:
        chosen = _chosen(dense, self, x, qr, mask, cache)
        if (choice := getattr(self, "choice", None)) is not None:
            choice.newest = chosen
        return chosen

    return choose


def _chosen(
    dense: Callable[..., Any], self: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any
) -> Any:
    if not isinstance(cache, AttendingCache):
        return dense(self, x, qr, mask, cache)
    queries = mx.unflatten(self.wq_b(qr), -1, (self.n_heads, self.head_dim)).swapaxes(1, 2)
    keys = self.k_norm(self.wk(x))[:, None]
    queries, keys = (self.rope(rows, offset=cache.offset) for rows in (queries, keys))
    weights = self.weights_proj(x).astype(mx.float32)
    weights = weights * (self.n_heads**-0.5 * self.softmax_scale)
    return cache.choose(keys, queries, weights, self.index_topk)


def _attending(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None:
            return dense(self, x, mask, None)
        shares = isinstance(self.indexer, _SharedIndexer)
        if not isinstance(cache[0], AttendingCache):
            own = _NoKeys(mx.zeros(1), mx.zeros(1)) if shares else cache[1]
            return dense(self, x, mask, (cache[0], own))
        normed, queries, rotated = project(self, x, cache[0])
        chosen = self.indexer(x, normed, None, cache=None if shares else cache[1])
        projections = self.embed_q, self.unembed_out
        out = cache[0].attend_chosen(queries, rotated, *projections, self.scale, chosen)
        projected: mx.array = self.o_proj(joined(out))
        return projected

    return attention


def project(layer: Any, x: mx.array, latents: Any) -> tuple[mx.array, mx.array, mx.array]:
    """Writes the latents of [T, 1, hidden] rows to a paged cache.

    Returns:
        The indexer's input, [T, 1, q_lora_rank], and the queries without and with RoPE, each
        [T, H, 1, n].
    """
    normed = layer.q_a_layernorm(layer.q_a_proj(x))
    queries = mx.unflatten(layer.q_b_proj(normed), -1, (layer.num_heads, layer.q_head_dim))
    queries, rotated = mx.split(queries.swapaxes(1, 2), [layer.qk_nope_head_dim], axis=-1)
    latent, key = mx.split(layer.kv_a_proj_with_mqa(x), [layer.kv_lora_rank], axis=-1)
    rotated = layer.rope(rotated, latents.offset)
    latents.update_and_fetch(
        layer.kv_a_layernorm(latent)[:, None], layer.rope(key[:, None], latents.offset)
    )
    return normed, queries, rotated
