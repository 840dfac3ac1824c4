# SPDX-License-Identifier: Apache-2.0
"""Makes Llama 3.2 Vision skip its layers that attend to images, as transformers does without any.

mlx-vlm's module runs them with keys and values made of queries. Here they are empty modules, so
that the other layers keep their numbers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.families.forwards import offset_of, through
from vllm_metal.patches.mlx_patches.replacing import after_init


def language(module: ModuleType) -> None:
    """Patches the text model, its caches, and positions, which differ by text."""

    def empty(model: Any, config: Any) -> None:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} must divide "
                f"hidden_size={config.hidden_size}"
            )
        skipped = set(config.cross_attention_layers).intersection(range(len(model.layers)))
        for index in skipped:
            model.layers[index] = nn.Module()

    def attending(model: Any) -> list[Any]:
        return [layer for layer in model.layers if "self_attn" in layer]

    def forward(self: Any, input_ids: mx.array, cache: Any = None, **_: Any) -> mx.array:
        return through(attending(self), self.embed_tokens(input_ids), cache, self.norm)

    def make_cache(self: Any) -> list[Any]:
        return [module.KVCache() for _ in attending(self.model)]

    after_init(module.MllamaTextModel, empty)
    module.MllamaTextModel.__call__ = forward
    module.LanguageModel.make_cache = make_cache
    module.cache_position_offset = offset_of  # type: ignore[attr-defined]
