# SPDX-License-Identifier: Apache-2.0
"""Text models alone, of families that mlx-lm reads as parts of multimodal ones.

transformers writes them under names of their own, experts one by one, and nothing that is not used:
Gemma 3n's last layers read K/V of others, and have no projections for their own. mlx-lm's module
would compute their own where it is given no caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, converted
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap

#: Parts of Gemma 3n's multimodal model.
_PARTS = ("language_model", "vision_tower", "audio_tower", "embed_audio", "embed_vision")
_OF_KV = ("k_proj", "v_proj", "k_norm")
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(.*)")


def gemma3n(module: ModuleType) -> None:
    """Names, the projections that are not there, and caches where none are given."""

    def drop_unused(layer: Any, config: Any, layer_idx: int, is_kv_shared_layer: bool) -> None:
        if is_kv_shared_layer:
            for name in _OF_KV:
                delattr(layer, name)

    def used(model: Any, weights: Arrays) -> Arrays:
        first = model.model.language_model.first_kv_shared_layer_idx
        return {_around(name): a for name, a in weights.items() if not _unused(name, first)}

    def cached(before: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            self: Any, inputs: Any = None, cache: Any = None, input_embeddings: Any = None
        ) -> mx.array:
            caches = self.make_cache() if cache is None else cache
            out: mx.array = before(self, inputs, caches, input_embeddings)
            return out

        return forward

    after_init(module.Gemma3nAttention, drop_unused)
    wrap(module.LanguageModel, "__call__", cached)
    converted(used)(module)


def _around(name: str) -> str:
    first, _, rest = name.partition(".")
    if first != "model" or rest.partition(".")[0] in _PARTS:
        return name
    return f"model.language_model.{rest}"


def _unused(name: str, first: int) -> bool:
    """Whether an array is of a projection for K/V in a layer from the first that reads others'."""
    parts = name.split(".")
    if "self_attn" not in parts or parts[parts.index("self_attn") + 1] not in _OF_KV:
        return False
    return int(parts[parts.index("self_attn") - 1]) >= first


def of_lfm2_vl(model: Any, weights: Arrays) -> Arrays:
    """The text's arrays of LFM2-VL, as transformers or mlx-vlm writes them.

    mlx-lm's module of the whole knows neither transformers' names nor its order of a convolution.
    """
    text: Arrays = {}
    for name, array in weights.items():
        inner = name.removeprefix("model.")
        if inner.startswith(_OF_IMAGES):
            continue
        if inner != name and inner.startswith("language_model."):  # as transformers writes it
            name = f"model.{inner.removeprefix('language_model.')}"
        text[name.removeprefix("language_model.")] = array
    return {f"language_model.{n}": a for n, a in model.language_model.sanitize(text).items()}


def stacked(model: Any, weights: Arrays) -> Arrays:
    """Puts the arrays of experts, each under its number, into one under `switch_mlp`."""
    apart: dict[str, dict[int, mx.array]] = {}
    others: Arrays = {}
    for name, array in weights.items():
        if (found := _EXPERT.fullmatch(name)) is None:
            others[name] = array
            continue
        place, number, last = found.groups()
        apart.setdefault(f"{place}.switch_mlp.{last}", {})[int(number)] = array
    return others | {
        name: mx.stack([arrays[number] for number in sorted(arrays)])
        for name, arrays in apart.items()
    }
