# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve Hy4 (hy_v4), and computes all but its RoPE as transformers does.

Its attention is DeepSeek's sparse attention over latents, with sinks and a gate of its output; see
sparse_attention.py. Residual streams are mixed by hyper-connections, which the module computes.

RoPE pairs neighboring elements: so do Tencent's class in vLLM (`HYV4MLAAttention`) and mlx-vlm's
module. transformers' class pairs elements of both halves, with the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import CacheList, KVCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, converted
from vllm_metal.patches.mlx_patches.families.forwards import joined
from vllm_metal.patches.mlx_patches.families.sparse_attention import check_kinds, choosing, project
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache

#: Names of arrays that transformers writes in other words than the published files.
_NAMES = (
    (re.compile(r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\."), r".\1.hc_pre."),
    (re.compile(r"\.hc_pre\.hc_head\."), ".hc_head."),
    (re.compile(r"\.mlp\.((?:shared_experts\.)?)linear_gate\."), r".mlp.\1gate_proj."),
)
#: Experts' arrays as published; the module's own names are those of MXFP8 files.
_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.((?:gate_up|down)_proj)")


class RotatesLast(nn.Module):
    """Rotates the last elements of a head by a rope that rotates the first ones.

    They come first in the result, which a product of queries and keys does not show.
    """

    def __init__(self, rope: Any, dims: int) -> None:
        super().__init__()
        self.rope, self.dims = rope, dims

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        rotated: mx.array = self.rope(mx.roll(x, self.dims, -1), offset=offset)
        return rotated


def config(module: ModuleType) -> None:
    """Adds the experts' limit, and rejects layers without a choice of positions."""
    base: Any = module.ModelConfig

    @dataclass
    class ModelConfig(base):
        swiglu_limit: float = 10.0

        def __post_init__(self) -> None:
            super().__post_init__()
            check_kinds(self.indexer_types, self.num_hidden_layers)
            if self.swiglu_limit <= 0:  # no limit in vLLM's class, zeros in transformers'
                raise ValueError(
                    f"swiglu_limit={self.swiglu_limit} of config.json is not supported: "
                    "implementations disagree on its meaning. Set a positive limit"
                )

    ModelConfig.__module__ = base.__module__
    module.ModelConfig = ModelConfig  # type: ignore[attr-defined]


def indexer(module: ModuleType) -> None:
    """Lets caches choose positions, and corrects the indexer's rope and norm."""

    def correct(layer: Any, args: Any) -> None:
        layer.k_norm.eps = args.rms_norm_eps
        layer.rope = RotatesLast(layer.rope, args.qk_rope_head_dim)

    after_init(module.HyV4Indexer, correct)
    # As the base class computes it: a compiled partition keeps the first text's index of the
    # smallest score to choose, whatever the length of the next text.
    module.HyV4Indexer.__call__ = choosing(module.Indexer.__call__)


def hyper_connection(module: ModuleType) -> None:
    """Adds the epsilon of the weights by which a layer's output enters the streams."""

    def adding(before: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
            collapsed, post = before(self, x)
            return collapsed, post + self.hc_eps

        return call

    wrap(module.IdentityHyperConnectionPre, "__call__", adding)


def language(module: ModuleType) -> None:
    """Lets the layers' caches compute attention, and clamps the experts' activations."""

    def limit(layer: Any, args: Any, layer_idx: int) -> None:
        if "switch_mlp" in layer.mlp:
            layer.mlp.switch_mlp.activation = _limited(args.swiglu_limit)

    after_init(module.HyV4DecoderLayer, limit)
    wrap(module.HyV4Attention, "__call__", _attending)
    module.LanguageModel.make_cache = _make_cache
    converted(_of_transformers)(module)


def _limited(limit: float) -> Callable[[mx.array, mx.array], mx.array]:
    def activation(x: mx.array, gate: mx.array) -> mx.array:
        return swiglu(mx.minimum(gate, limit), mx.clip(x, -limit, limit))

    return activation


def _make_cache(self: Any) -> list[Any]:
    return [
        CacheList(KVCache(), *([] if layer.self_attn.skip_topk else [KVCache()]))
        for layer in self.layers
    ]


def _attending(dense: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        self: Any, x: mx.array, mask: Any = None, cache: Any = None, prev_topk_indices: Any = None
    ) -> Any:
        if cache is None or not isinstance(cache[0], AttendingCache):
            return dense(self, x, mask, cache, prev_topk_indices)
        normed, queries, rotated = project(self, x, cache[0])
        chosen = prev_topk_indices
        if self.indexer is not None:
            chosen = self.indexer(x, normed, None, cache=cache[1])
        sinks = self.learnable_sink_param.astype(x.dtype)
        projections = self.embed_q, self.unembed_out
        out = cache[0].attend_chosen(queries, rotated, *projections, self.scale, chosen, sinks)
        return self.o_proj(joined(out) * mx.sigmoid(self.linear_gate(x))), chosen

    return attention


def _of_transformers(model: Any, weights: Arrays) -> Arrays:
    """Renames arrays, and splits the projection of latents, which the module does for MXFP8."""
    found: Arrays = {}
    args = model.args
    heads = args.num_attention_heads, args.qk_nope_head_dim + args.v_head_dim, -1
    for name, array in weights.items():
        for pattern, replacement in _NAMES:
            name = pattern.sub(replacement, name)
        if name.endswith(".kv_b_proj.weight"):
            prefix = name.removesuffix("kv_b_proj.weight")
            keys, values = mx.split(array.reshape(heads), [args.qk_nope_head_dim], axis=1)
            found[f"{prefix}embed_q.weight"] = mx.contiguous(keys.swapaxes(-1, -2))
            found[f"{prefix}unembed_out.weight"] = mx.contiguous(values)
            continue
        if (experts := _EXPERTS.fullmatch(name)) is not None:
            name = f"{experts[1]}.switch_mlp.{experts[2]}.weight"
        found[name] = array
    return found
