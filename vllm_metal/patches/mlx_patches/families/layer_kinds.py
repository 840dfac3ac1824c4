# SPDX-License-Identifier: Apache-2.0
"""Layers of two kinds in any order, which `layer_types` names.

mlx-lm's modules of Qwen3-Next and Qwen3.5 (attention, or a recurrence), of Gemma 3 (with a window,
or without one) and of Command R7B (the same, and without positions) read a period instead: every so
manieth layer is of the second kind. Gemma 3's rounds a factor to bfloat16 in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_metal.patches.mlx_patches.families.windows import (
    by_kind,
    caches_by_window,
    embedded,
    scaled_embeddings,
)
from vllm_metal.patches.mlx_patches.replacing import after_init, replaced, wrap

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def qwen3_next(module: ModuleType) -> None:
    """Its arguments, its layers, and which of them the masks are made for."""
    _with_layer_types(module, "ModelArgs", "full_attention_interval", _LINEAR)
    _built_by_kind(module.Qwen3NextDecoderLayer, "full_attention_interval")
    after_init(module.Qwen3NextModel, _find_first_layers)


def qwen3_5(module: ModuleType) -> None:
    """Arguments, layers and masks of Qwen3.5 and its mixture of experts, as of Qwen3-Next."""
    _with_layer_types(module, "TextModelArgs", "full_attention_interval", _LINEAR)
    _built_by_kind(module.DecoderLayer, "full_attention_interval")
    after_init(module.Qwen3_5TextModel, _find_first_layers)


def cohere2(module: ModuleType) -> None:
    """Its arguments, its layers, their caches, and the forward around them."""
    _with_layer_types(module, "ModelArgs", "sliding_window_pattern", _SLIDING)
    _built_by_kind(module.Attention, "sliding_window_pattern")
    module.CohereModel.__call__ = by_kind(embedded)
    module.Model.make_cache = caches_by_window


def gemma3_text(module: ModuleType) -> None:
    """Layers in any order, and the embeddings' factor in the model's dtype."""
    _with_layer_types(module, "ModelArgs", "sliding_window_pattern", _SLIDING)
    _built_by_kind(module.Attention, "sliding_window_pattern")
    module.Gemma3Model.__call__ = by_kind(scaled_embeddings)
    module.Model.make_cache = caches_by_window


def _with_layer_types(module: ModuleType, name: str, period: str, other: str) -> None:
    """Gives arguments the key; files without it have every so manieth layer whole.

    Args:
        module: of mlx-lm.
        name: of its class of arguments.
        period: the key that says how manieth.
        other: the kind of the other layers.
    """
    base: Any = getattr(module, name)

    @dataclass
    class ModelArgs(base):
        layer_types: list[str] | None = None

        def __post_init__(self) -> None:
            if hasattr(base, "__post_init__"):
                super().__post_init__()
            if self.layer_types is None:
                every = getattr(self, period)
                self.layer_types = [
                    other if (index + 1) % every else _FULL
                    for index in range(self.num_hidden_layers)
                ]
            strange = sorted(set(self.layer_types) - {_FULL, other})
            if strange:
                raise ValueError(f"layer_types of config.json name {', '.join(strange)}")
            if other == _LINEAR and _LINEAR not in self.layer_types:
                # mlx-lm tells by a convolution whether norms are stored less one.
                raise ValueError("layer_types of config.json have no layer of linear_attention")

    setattr(module, name, ModelArgs)


def _built_by_kind(cls: Any, period: str) -> None:
    """Has a class make the kind of layer that `layer_types` says."""

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any, layer_idx: int) -> None:
            # mlx-lm asks whether the layer's number is a multiple of the period, and no more.
            every = 1 if args.layer_types[layer_idx] == _FULL else layer_idx + 2
            with replaced(args, period, every):
                before(self, args, layer_idx)

        return init

    wrap(cls, "__init__", built)


def _find_first_layers(model: Any, args: Any) -> None:
    """Masks are made for the first layer of each kind; where there is none, no mask is."""
    kinds = {kind: args.layer_types.index(kind) for kind in set(args.layer_types)}
    model.ssm_idx, model.fa_idx = kinds.get(_LINEAR), kinds.get(_FULL)
