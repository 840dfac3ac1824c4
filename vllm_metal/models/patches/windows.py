# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and 3: which layers have a sliding window is read off `layer_types`.

mlx-lm's module of Gemma 2 gives every layer the whole context. That of Gemma 3 reads a period,
`sliding_window_pattern`, which transformers does not write, and rounds a factor to bfloat16 in
every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from vllm_metal.models.patches.patch import replace_method

_SLIDING, _FULL = "sliding_attention", "full_attention"


def gemma2(module: ModuleType) -> None:
    """Windows, in every other layer where the configuration does not say which."""
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
    module.GemmaModel.__call__ = by_kind(_scaled_embeddings, return_array=True)
    module.Model.make_cache = caches_by_window


def gemma3_text(module: ModuleType) -> None:
    """Layers in any order, and the embeddings' factor in the model's dtype."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        layer_types: list[str] | None = None

        def __post_init__(self) -> None:
            if self.layer_types is None:
                period = self.sliding_window_pattern
                self.layer_types = [
                    _SLIDING if (index + 1) % period else _FULL
                    for index in range(self.num_hidden_layers)
                ]

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any, layer_idx: int) -> None:
            # mlx-lm asks for the remainder of the index, and for nothing else of it.
            sliding = args.layer_types[layer_idx] == _SLIDING
            period, args.sliding_window_pattern = args.sliding_window_pattern, 2
            try:
                before(self, args, 0 if sliding else 1)
            finally:
                args.sliding_window_pattern = period
            self.layer_idx = layer_idx

        return init

    replace_method(module.Attention, "__init__", built)
    module.Gemma3Model.__call__ = by_kind(_scaled_embeddings)
    module.Model.make_cache = caches_by_window


def _scaled_embeddings(model: Any, inputs: mx.array, embeddings: mx.array | None) -> mx.array:
    hidden = model.embed_tokens(inputs) if embeddings is None else embeddings
    return hidden * mx.array(model.args.hidden_size**0.5, hidden.dtype)


def by_kind(
    embedded: Callable[[Any, mx.array, mx.array | None], mx.array], **options: bool
) -> Callable[..., mx.array]:
    """The forward of a model whose layers differ in their window alone.

    Args:
        embedded: of tokens, or of embeddings given in their place.
        options: of the masks.
    """

    def forward(
        self: Any,
        inputs: mx.array,
        cache: Any = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        hidden = embedded(self, inputs, input_embeddings)
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


def caches_by_window(self: Any) -> list[Any]:
    """mlx-lm's caches of the layers."""
    window = self.args.sliding_window
    return [
        RotatingKVCache(max_size=window) if kind == _SLIDING and window else KVCache()
        for kind in self.args.layer_types
    ]
