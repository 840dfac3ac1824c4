# SPDX-License-Identifier: Apache-2.0
"""Makes mlx-lm's OLMo read transformers' files, return logits, and attend through its cache.

mlx-lm's module is for files of another package, with other names and one array for several
projections. It returns its caches beside the logits, and has no grouped heads and no clipping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.forwards import attend, offset_of, through
from vllm_metal.patches.mlx_patches.replacing import after_init

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.(\w+)")
#: Parts of transformers' names, and the module's.
_NAMES = {
    "model.embed_tokens.": "model.transformer.wte.",
    "lm_head.": "model.transformer.ff_out.",
}
_LAYERS = {"o_proj": "attn_out", "down_proj": "ff_out"}
#: Projections in one array, in this order.
_JOINED = {"att_proj": ("q_proj", "k_proj", "v_proj"), "ff_proj": ("up_proj", "gate_proj")}


def olmo(module: ModuleType) -> None:
    """Patches arguments, attention, the forward, and names of arrays."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        n_kv_heads: int | None = None
        clip_qkv: float | None = None
        tie_word_embeddings: bool = False
        weight_tying: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            self.n_kv_heads = self.n_kv_heads or self.n_heads
            self.weight_tying |= self.tie_word_embeddings

    def group(block: Any, args: Any) -> None:
        width = args.d_model // args.n_heads * (args.n_heads + 2 * args.n_kv_heads)
        block.att_proj = nn.Linear(args.d_model, width, bias=False)

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]
    after_init(module.TransformerBlock, group)
    module.TransformerBlock.attend = _attend
    module.Transformer.__call__ = _logits
    module.Model.sanitize = _sanitize


def _attend(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    projected, args = self.att_proj(x), self.args
    if args.clip_qkv is not None:
        projected = mx.clip(projected, -args.clip_qkv, args.clip_qkv)
    heads = projected.reshape(*x.shape[:2], args.n_heads + 2 * args.n_kv_heads, -1).swapaxes(1, 2)
    last = args.n_heads + args.n_kv_heads
    queries, keys, values = mx.split(heads, (args.n_heads, last), axis=1)
    queries, keys = (self.rope(each, offset=offset_of(cache)) for each in (queries, keys))
    return attend(queries, keys, values, self.scale, cache, mask, self.attn_out)


def _logits(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    hidden = through(self.blocks, self.wte(inputs), cache, self.norm)
    logits: mx.array = self.wte.as_linear(hidden) if self.weight_tying else self.ff_out(hidden)
    return logits


def _sanitize(self: Any, weights: Arrays) -> Arrays:
    found: Arrays = {}
    parts: dict[str, dict[str, mx.array]] = {}
    for name, array in weights.items():
        if (match := _BLOCK.fullmatch(name)) is None:
            found[_renamed(name)] = array
            continue
        index, projection, last = match.groups()
        prefix = f"model.transformer.blocks.{index}"
        joined = next((key for key, names in _JOINED.items() if projection in names), None)
        if joined is None:
            found[f"{prefix}.{_LAYERS.get(projection, projection)}.{last}"] = array
        else:
            parts.setdefault(f"{prefix}.{joined}.{last}", {})[projection] = array
    return found | {name: _concatenated(name, arrays) for name, arrays in parts.items()}


def _renamed(name: str) -> str:
    for prefix, other in _NAMES.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def _concatenated(name: str, arrays: Mapping[str, mx.array]) -> mx.array:
    order = _JOINED[name.split(".")[-2]]
    return mx.concatenate([arrays[projection] for projection in order])
