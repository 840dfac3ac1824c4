# SPDX-License-Identifier: Apache-2.0
"""Sets sliding windows of layers that mlx-lm's modules read differently from transformers.

mlx-lm's Gemma 2 module gives every layer the whole context, and caps attention scores in its own
code. Those of Phi 3, StarCoder 2 and Mistral ignore a window of all layers, with which the first
models of each were trained (Mistral 7B v0.1: 4096 tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from vllm_metal.patches.mlx_patches.families.forwards import heads, joined
from vllm_metal.patches.mlx_patches.replacing import replaced, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring

_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNSET = -1  # missing in config.json; None means no window


def gemma2(module: ModuleType) -> None:
    """Adds windows, by default in every other layer, and lets paged caches compute attention."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        sliding_window: int | None = 4096  # transformers' default of Gemma2Config
        layer_types: list[str] | None = None

        def __post_init__(self) -> None:
            if self.layer_types is None:
                pair = _SLIDING, _FULL
                self.layer_types = [pair[index % 2] for index in range(self.num_hidden_layers)]

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]
    wrap(module.Attention, "__call__", _attend_with_cap)
    module.GemmaModel.__call__ = by_kind(scaled_embeddings, return_array=True)
    module.Model.make_cache = caches_by_window


def _attend_with_cap(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, AttendingCache):
            return dense(self, x, mask, cache)
        queries, keys, values = heads(self, x, self.head_dim)
        queries = self.rope(queries, offset=cache.offset)
        keys, values = cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)
        scoring = Scoring(self.scale, softcap=self.attn_logit_softcapping)
        mixed = cache.attend(queries, keys, values, scoring)
        projected: mx.array = self.o_proj(joined(mixed))
        return projected

    return attention


def of_all_layers(model: str) -> Callable[[ModuleType], None]:
    """Returns a patch that applies the configured window to all layers of class `model`."""

    def apply(module: ModuleType) -> None:
        base: Any = module.ModelArgs

        @dataclass
        class ModelArgs(base):
            sliding_window: int | None = None

            def __post_init__(self) -> None:
                if hasattr(base, "__post_init__"):
                    super().__post_init__()
                kind = _SLIDING if self.sliding_window else _FULL
                self.layer_types = [kind] * self.num_hidden_layers

        module.ModelArgs = ModelArgs  # type: ignore[attr-defined]
        getattr(module, model).__call__ = by_kind(embedded)
        module.Model.make_cache = caches_by_window

    return apply


def mistral(module: ModuleType) -> None:
    """Applies Mistral's window to all layers; mlx-lm reads Mistral's files with Llama's module."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        sliding_window: int | None = _UNSET

        def __post_init__(self) -> None:
            of_mistral = self.model_type == "mistral"
            if self.sliding_window == _UNSET:  # transformers' default of MistralConfig
                self.sliding_window = 4096 if of_mistral else None
            if of_mistral:  # all layers or none, as in transformers' class
                kind = _SLIDING if self.sliding_window else _FULL
                self.layer_types = [kind] * self.num_hidden_layers
            super().__post_init__()

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any) -> None:
            kinds = args.layer_types
            # mlx-lm needs a layer without a window to make a mask from.
            shown = kinds if _FULL in kinds else [*kinds[:-1], _FULL]
            with replaced(args, "layer_types", shown):
                before(self, args)
            self.layer_types = kinds
            for layer, kind in zip(self.layers, kinds, strict=True):
                layer.use_sliding = kind == _SLIDING

        return init

    wrap(module.LlamaModel, "__init__", built)
    module.LlamaModel.__call__ = by_kind(embedded)
    module.Model.make_cache = caches_by_window


def embedded(model: Any, inputs: mx.array, embeddings: mx.array | None) -> mx.array:
    """Returns `embeddings`; if None, those of the tokens `inputs`."""
    found: mx.array = model.embed_tokens(inputs) if embeddings is None else embeddings
    return found


def scaled_embeddings(model: Any, inputs: mx.array, embeddings: mx.array | None) -> mx.array:
    """Returns the result of `embedded` times Gemma's factor, computed in the model's dtype."""
    hidden = embedded(model, inputs, embeddings)
    return hidden * mx.array(model.args.hidden_size**0.5, hidden.dtype)


def by_kind(
    embed: Callable[[Any, mx.array, mx.array | None], mx.array], **options: bool
) -> Callable[..., mx.array]:
    """Returns the forward of a model whose layers differ only in their window.

    embed: a function like `embedded`. options: passed to the functions that create masks.
    """

    def forward(
        self: Any,
        inputs: mx.array,
        cache: Any = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        hidden = embed(self, inputs, input_embeddings)
        caches = [None] * len(self.layers) if cache is None else cache
        masks: dict[str, Any] = {}
        for layer, kind, of_layer in zip(self.layers, self.args.layer_types, caches, strict=True):
            if kind not in masks:
                window = self.args.sliding_window if kind == _SLIDING else None
                masks[kind] = create_attention_mask(hidden, of_layer, window, **options)
            hidden = layer(hidden, masks[kind], of_layer)
        normed: mx.array = self.norm(hidden)
        return normed

    return forward


def caches_of_text(module: ModuleType) -> None:
    """Gives a multimodal model its text model's caches; mlx-lm's give no layer a window."""

    def make_cache(self: Any) -> list[Any]:
        return make_prompt_cache(self.language_model)

    module.Model.make_cache = make_cache


def caches_by_window(self: Any) -> list[Any]:
    window = self.args.sliding_window
    return [
        RotatingKVCache(max_size=window) if kind == _SLIDING and window else KVCache()
        for kind in self.args.layer_types
    ]
