# SPDX-License-Identifier: Apache-2.0
"""Ropes for modules of mlx-lm's that make plain ones, whatever config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from vllm_metal.models import published_config
from vllm_metal.models.weight_files import ModelLoadError


def mend_ropes(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replaces them where the config asks for others: scaled, or of a share of each head.

    The new ones are those that mlx-lm's other modules have for such a configuration.

    Args:
        model: as mlx-lm makes it.
        config: of config.json.

    Raises:
        ModelLoadError: the model has no rope, or mlx-lm knows no such scaling.
    """
    module = type(model).__module__.rpartition(".")[2]
    scaling = published_config.scaling(config) if module in published_config.UNSCALED else None
    share = published_config.rotated_share(config) if module in published_config.PARTIAL else 1.0
    if scaling is None and share == 1.0:
        return
    ropes = [(each, each.rope) for _, each in model.named_modules() if _has_plain_rope(each)]
    if not ropes:
        raise ModelLoadError("config.json says how positions are scaled: the model has no rope")
    for layer, rope in ropes:
        try:
            layer.rope = initialize_rope(
                int(rope.dims * share),
                rope.base,
                rope.traditional,
                scaling,
                config.get("max_position_embeddings"),
            )
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"the rope that config.json asks for: {error}") from error


def _has_plain_rope(layer: nn.Module) -> bool:
    return type(layer.get("rope")) is nn.RoPE
