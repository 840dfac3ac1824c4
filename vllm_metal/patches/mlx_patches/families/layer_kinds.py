# SPDX-License-Identifier: Apache-2.0
"""Reads the order of two kinds of layers from `layer_types`.

mlx-lm's modules of Qwen3-Next and Qwen3.5 (recurrence or attention), of Gemma 3 (with or without a
window) and of Command R7B (with a window, or without window and positions) read a period instead:
every n-th layer is of the second kind. Gemma 3's module also rounds the embeddings' factor to
bfloat16 for every dtype.
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
    """Makes Qwen3-Next build its layers, and choose those that make masks, by `layer_types`."""
    _with_layer_types(module, "ModelArgs", "full_attention_interval", _LINEAR)
    _build_by_kind(module.Qwen3NextDecoderLayer, "full_attention_interval")
    after_init(module.Qwen3NextModel, _find_first_layers)


def qwen3_5(module: ModuleType) -> None:
    """Makes Qwen3.5 and its mixture of experts build layers and masks by `layer_types`."""
    _with_layer_types(module, "TextModelArgs", "full_attention_interval", _LINEAR)
    _build_by_kind(module.DecoderLayer, "full_attention_interval")
    after_init(module.Qwen3_5TextModel, _find_first_layers)


def cohere2(module: ModuleType) -> None:
    """Makes Command R7B choose window and positions of each layer by `layer_types`."""
    _with_layer_types(module, "ModelArgs", "sliding_window_pattern", _SLIDING)
    _build_by_kind(module.Attention, "sliding_window_pattern")
    module.CohereModel.__call__ = by_kind(embedded)
    module.Model.make_cache = caches_by_window


def cohere2_moe(module: ModuleType) -> None:
    """Makes Cohere 2 MoE choose windows as transformers does, and weigh experts by its softmax.

    mlx-vlm's module gives leading dense layers no window, and counts periods from the first layer
    instead of the first one with experts. Its softmax covers all experts, not the chosen ones.
    """

    def is_sliding(args: Any, layer_idx: int) -> bool:
        if args.layer_types is not None:
            return bool(args.layer_types[layer_idx] == _SLIDING)
        dense = args.first_k_dense_replace
        if layer_idx < dense:
            return (layer_idx + 1) % args.prefix_dense_sliding_window_pattern != 0
        return (layer_idx - dense + 1) % args.sliding_window_pattern != 0

    def normalize(block: Any, args: Any) -> None:
        # Equal to a softmax over the chosen experts' scores.
        block.norm_topk_prob = block.norm_topk_prob or args.moe_gate_act == "softmax"

    module.is_sliding_layer = is_sliding  # type: ignore[attr-defined]
    after_init(module.CohereMoeSparseMoeBlock, normalize)


def gemma3_text(module: ModuleType) -> None:
    """Makes Gemma 3 choose windows by `layer_types`, and scale embeddings in the model's dtype."""
    _with_layer_types(module, "ModelArgs", "sliding_window_pattern", _SLIDING)
    _build_by_kind(module.Attention, "sliding_window_pattern")
    module.Gemma3Model.__call__ = by_kind(scaled_embeddings)
    module.Model.make_cache = caches_by_window


def _with_layer_types(module: ModuleType, name: str, period: str, other: str) -> None:
    """Adds `layer_types` to a module's arguments; by default every n-th layer has full attention.

    name: class of the arguments. period: its field for n. other: kind of the other layers.
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
            unknown = sorted(set(self.layer_types) - {_FULL, other})
            if unknown:
                raise ValueError(
                    f"layer_types of config.json has {', '.join(unknown)}, which is not supported: "
                    f"expected {_FULL} or {other}. Choose another checkpoint"
                )
            if other == _LINEAR and _LINEAR not in self.layer_types:
                # mlx-lm infers from a convolution whether norms are stored minus one.
                raise ValueError(
                    "layer_types of config.json without linear_attention is not supported. "
                    "Choose another checkpoint"
                )

    setattr(module, name, ModelArgs)


def _build_by_kind(cls: Any, period: str) -> None:
    """Makes a layer class read its kind from `layer_types` instead of `period`."""

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any, layer_idx: int) -> None:
            # mlx-lm only tests whether the layer's number is a multiple of the period.
            every = 1 if args.layer_types[layer_idx] == _FULL else layer_idx + 2
            with replaced(args, period, every):
                before(self, args, layer_idx)

        return init

    wrap(cls, "__init__", built)


def _find_first_layers(model: Any, args: Any) -> None:
    """Sets the layers whose caches make the masks: the first layer of each kind, or None."""
    kinds = {kind: args.layer_types.index(kind) for kind in set(args.layer_types)}
    model.ssm_idx, model.fa_idx = kinds.get(_LINEAR), kinds.get(_FULL)
