# SPDX-License-Identifier: Apache-2.0
"""Loads a pooling decoder: mlx-lm's module without its head, and a pooler for its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten

from vllm_metal.engine.models import headless, loader
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.pooling import classifier, poolers
from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.pooler.abstract import Pooler

    from vllm_metal.engine.weights.disk_tables import TableRule


@dataclass(frozen=True)
class Pooling:
    parts: ModelParts
    pooler: Pooler


def load(config: VllmConfig, tables: TableRule | None = None) -> Pooling:
    """Loads the decoder without a head for logits, and its pooler; `tables` as in `loader.load`.

    Raises:
        ModelLoadError: see `loader.load`; or the files lack a required classifier, or something
            other than a head follows the model's layers.
    """
    found: list[tuple[ModelParts, torch.nn.Module | None]] = []

    def prepare(model: nn.Module) -> None:
        parts = ModelParts(model)
        _check_that_only_a_head_follows(parts, loader.model_type(config))
        found.append((parts, _classifier(parts, config)))
        headless.drop_head(model)

    loader.load(config, classes=headless.classes, prepare=prepare, tables=tables)
    ((parts, layer),) = found
    return Pooling(parts, poolers.make(config, layer))


def _classifier(parts: ModelParts, config: VllmConfig) -> torch.nn.Module | None:
    model_config = config.model_config
    if model_config.convert_type != "classify":
        return None
    if classifier.asked(model_config) is not None:
        return classifier.of_head(parts.model, parts.input_embedding, model_config)
    return classifier.stored(model_files.model_folder(model_config, config), model_config)


def _check_that_only_a_head_follows(parts: ModelParts, model_type: str) -> None:
    if (decoder := parts.decoder_path) is None:
        raise ModelLoadError(
            f"{model_type} cannot be served with --runner pooling: mlx-lm's module does not "
            "separate hidden states from logits"
        )
    head = headless.head_path(parts.model)
    inside = tuple(f"{path}." for path in (decoder, head) if path is not None)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(parts.model.parameters()))
    names = [name for name, _ in parameters]
    # Headless pooling would silently skip such parameters, for example a norm after the layers.
    if others := [name for name in names if not name.startswith(inside)]:
        raise ModelLoadError(
            f"{model_type} cannot be served with --runner pooling: mlx-lm's module has "
            f"{', '.join(others[:3])} besides its layers, which may change the hidden states"
        )
