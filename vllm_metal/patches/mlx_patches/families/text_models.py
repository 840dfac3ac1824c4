# SPDX-License-Identifier: Apache-2.0
"""Loads text-only checkpoints of families that mlx-lm only reads as multimodal models.

transformers writes text models under other names, with one array per expert and without unused
arrays. Gemma 3n's last layers share K/V of others, so their K/V projections are missing; mlx-lm's
module uses them only if it is called without caches.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, converted
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap

#: Components of Gemma 3n's multimodal model.
_PARTS = ("language_model", "vision_tower", "audio_tower", "embed_audio", "embed_vision")
_KV_PARTS = ("k_proj", "v_proj", "k_norm")
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.")
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(.*)")


def gemma3n(module: ModuleType) -> None:
    """Renames arrays, drops unused K/V projections, and creates caches if none are given."""

    def drop_unused(layer: Any, config: Any, layer_idx: int, is_kv_shared_layer: bool) -> None:
        if is_kv_shared_layer:
            for name in _KV_PARTS:
                delattr(layer, name)

    def used(model: Any, weights: Arrays) -> Arrays:
        first = model.model.language_model.first_kv_shared_layer_idx
        return {_with_prefix(name): a for name, a in weights.items() if not _is_unused(name, first)}

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


def known_keys(module: ModuleType) -> None:
    """Makes the classes of a multimodal configuration's parts drop keys that they do not have.

    config.json is checked for keys with an effect before.
    """

    def filtered(before: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(before).parameters
        return lambda self, **keys: before(
            self, **{name: value for name, value in keys.items() if name in names}
        )

    for part in (module.TextConfig, module.VisionConfig):
        wrap(part, "__init__", filtered)


def text_of_its_own(module: ModuleType) -> None:
    """Makes a configuration read its `text_config`, if any, instead of keys beside it.

    Published files of the family have none, but a derived key is set there.
    """

    def nested(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda keys: before({**keys, **(keys.get("text_config") or {})})

    wrap(module.ModelConfig, "from_dict", nested)


def part_of_a_whole(module: ModuleType) -> None:
    """Makes a multimodal configuration read a text model's config.json as its `text_config`."""

    def nested(before: Callable[..., Any]) -> Callable[..., Any]:
        def read(keys: dict[str, Any]) -> Any:
            if "text_config" in keys:
                return before(keys)
            return before({"model_type": keys["model_type"], "text_config": {**keys}})

        return read

    wrap(module.ModelConfig, "from_dict", nested)


def first_of_two(*names: str) -> Callable[[ModuleType], None]:
    """Returns a patch of a text configuration: of pairs for text and images, text's counts."""

    def patch(module: ModuleType) -> None:
        def choose(config: Any, *_: Any, **__: Any) -> None:
            for name in names:
                if isinstance(value := getattr(config, name), list):
                    setattr(config, name, value[0])

        after_init(module.TextConfig, choose)

    return patch


def added_tokens(name: str) -> Callable[[ModuleType], None]:
    """Returns a patch of an embedding in two arrays, for a vocabulary and for tokens added to it.

    The module concatenates both arrays in every step, which copies a gigabyte for Molmo 7B.
    """

    def embed(self: Any, tokens: mx.array) -> mx.array:
        size = self.embedding.shape[0]
        own = self.embedding[mx.minimum(tokens, size - 1)]
        added = self.new_embedding[mx.maximum(tokens, size) - size]
        return mx.where((tokens < size)[..., None], own, added)

    def patch(module: ModuleType) -> None:
        getattr(module, name).__call__ = embed

    return patch


def _with_prefix(name: str) -> str:
    first, _, rest = name.partition(".")
    if first != "model" or rest.partition(".")[0] in _PARTS:
        return name
    return f"model.language_model.{rest}"


def _is_unused(name: str, first: int) -> bool:
    """Returns whether an array is a K/V projection of a layer from `first` on: these share K/V."""
    parts = name.split(".")
    if "self_attn" not in parts or parts[parts.index("self_attn") + 1] not in _KV_PARTS:
        return False
    return int(parts[parts.index("self_attn") - 1]) >= first


def of_lfm2_vl(model: Any, weights: Arrays) -> Arrays:
    """Renames LFM2-VL's text arrays, as written by transformers or mlx-vlm."""
    text: Arrays = {}
    for name, array in weights.items():
        inner = name.removeprefix("model.")
        if inner.startswith(_IMAGE_PREFIXES):
            # mlx-lm's module of the whole model knows neither transformers' names nor its axis
            # order of a convolution.
            continue
        if inner != name and inner.startswith("language_model."):  # transformers' name
            name = f"model.{inner.removeprefix('language_model.')}"
        text[name.removeprefix("language_model.")] = array
    return {f"language_model.{n}": a for n, a in model.language_model.sanitize(text).items()}


def stacked(model: Any, weights: Arrays) -> Arrays:
    """Stacks the arrays of numbered experts into one under `switch_mlp`."""
    by_name: dict[str, dict[int, mx.array]] = {}
    others: Arrays = {}
    for name, array in weights.items():
        if (found := _EXPERT.fullmatch(name)) is None:
            others[name] = array
            continue
        prefix, number, last = found.groups()
        by_name.setdefault(f"{prefix}.switch_mlp.{last}", {})[int(number)] = array
    return others | {
        name: mx.stack([arrays[number] for number in sorted(arrays)])
        for name, arrays in by_name.items()
    }
