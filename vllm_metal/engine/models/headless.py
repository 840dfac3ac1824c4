# SPDX-License-Identifier: Apache-2.0
"""Builds mlx-lm's decoders without a head, for checkpoints without one or with another task's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.weights.layers import dense_rows
from vllm_metal.patches.mlx_patches import registry as patches

#: Names of the module that makes logits in mlx-lm's families.
_HEADS = ("lm_head", "embed_out", "output")
#: Name prefixes in a checkpoint of only the decoder; a whole model's have "model." before them.
_DECODER_PREFIXES = ("embed_tokens.", "layers.", "norm.")
#: Arrays of another task's head, which `pooling.classifier` reads itself.
OTHER_HEAD = "score."


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """Returns mlx-lm's model and arguments for a config.json, as `mlx_patches.registry.classes`.

    The model takes checkpoints without a head for logits, or with another task's; it only has its
    own head if the checkpoint does. Raises ValueError if mlx-lm has no such module.
    """
    model, args = patches.classes(config)
    return _headless(model), args


@functools.cache
def _headless(model: type) -> type:
    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = {
            _whole_name(self, name): array
            for name, array in weights.items()
            if not name.startswith(OTHER_HEAD)
        }
        if hasattr(model, "sanitize"):
            weights = model.sanitize(self, weights)
        if (path := head_path(self)) and not any(name.startswith(f"{path}.") for name in weights):
            drop_head(self)
        return weights

    return type(model.__name__, (model,), {"sanitize": sanitize, "__module__": model.__module__})


def _whole_name(model: nn.Module, name: str) -> str:
    # A checkpoint of only the decoder omits "model.".
    inner = model.get("model")
    alone = (
        isinstance(inner, nn.Module) and "layers" in inner and name.startswith(_DECODER_PREFIXES)
    )
    return f"model.{name}" if alone else name


def head_path(model: nn.Module) -> str | None:
    """Returns the path of the module that makes logits, or None if tied or dropped."""
    for path, module in model.named_modules():
        if path.split(".")[-1] in _HEADS and not _within_layers(path) and module.parameters():
            return path
    return None


def _within_layers(path: str) -> bool:
    # Layers may have modules of the same names, such as an "output" projection.
    return any(part.isdigit() for part in path.split("."))


class _NoHead(nn.Module):
    """Replaces a model's head and computes nothing."""

    def __call__(self, hidden_states: mx.array) -> mx.array:
        return hidden_states


def drop_head(model: nn.Module) -> None:
    """Removes the module that makes logits; the model then only gives hidden states."""
    if (path := head_path(model)) is None:
        return
    *outer, name = path.split(".")
    parent: Any = functools.reduce(getattr, outer, model)
    setattr(parent, name, _NoHead())


def head_rows(model: nn.Module, embedding: nn.Module, token_ids: Sequence[int]) -> mx.array:
    """Returns [n, H] float32 rows of the head's weight, dequantized; lazy.

    `embedding` is used if the model has no head of its own.
    """
    ids = mx.array(list(token_ids))
    if (path := head_path(model)) is None:
        return cast(mx.array, embedding(ids)).astype(mx.float32)
    head: Any = functools.reduce(getattr, path.split("."), model)
    return dense_rows(head, ids)
