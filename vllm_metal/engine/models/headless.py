# SPDX-License-Identifier: Apache-2.0
"""Builds mlx-lm's decoders without a head: checkpoints may lack it, or have one for other tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.weights.layers import dense_rows
from vllm_metal.patches.mlx_patches import registry as patches

#: What mlx-lm's families call the module that makes logits.
_HEADS = ("lm_head", "embed_out", "output")
#: What a checkpoint of a decoder alone begins its names with, where one of the whole has "model.".
_OF_DECODERS = ("embed_tokens.", "layers.", "norm.")
#: Arrays of a head of another task, which `pooling.classifier` reads for itself.
OTHER_HEAD = "score."


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's model and its arguments for a config.json, as `mlx_patches.registry.classes`.

    The model takes a checkpoint that has no head for logits, or one for another task. Its own head
    is there only if the checkpoint has it.

    Raises:
        ValueError: mlx-lm has no such module.
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
    """An array's name in the whole model, where a checkpoint of the decoder alone has it so."""
    inner = model.get("model")
    alone = isinstance(inner, nn.Module) and "layers" in inner and name.startswith(_OF_DECODERS)
    return f"model.{name}" if alone else name


def head_path(model: nn.Module) -> str | None:
    """Where the module is that makes logits; None: the embedding does, or it was dropped."""
    for path, module in model.named_modules():
        if path.split(".")[-1] in _HEADS and not _within_layers(path) and module.parameters():
            return path
    return None


def _within_layers(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


class _NoHead(nn.Module):
    """Stands where a model calls its head, and has nothing to compute."""

    def __call__(self, hidden_states: mx.array) -> mx.array:
        return hidden_states


def drop_head(model: nn.Module) -> None:
    """Takes away the module that makes logits; the model can give hidden states only."""
    if (path := head_path(model)) is None:
        return
    *outer, name = path.split(".")
    parent: Any = functools.reduce(getattr, outer, model)
    setattr(parent, name, _NoHead())


def head_rows(model: nn.Module, embedding: nn.Module, token_ids: Sequence[int]) -> mx.array:
    """[n, H] float32 rows of the weight that makes logits, as if it were not quantized; lazy.

    Args:
        model: with its head, if it has one of its own.
        embedding: of the model, which is the head where there is no other.
        token_ids: of the rows.
    """
    ids = mx.array(list(token_ids))
    if (path := head_path(model)) is None:
        return cast(mx.array, embedding(ids)).astype(mx.float32)
    head: Any = functools.reduce(getattr, path.split("."), model)
    return dense_rows(head, ids)
