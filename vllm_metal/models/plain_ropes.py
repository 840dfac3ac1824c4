# SPDX-License-Identifier: Apache-2.0
"""Ropes for modules of mlx-lm's that make plain ones, whatever config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx_lm.models import rope_utils  # whose function is patched, see `ropes`

from vllm_metal.models.config_refusals import PARTIAL, UNSCALED
from vllm_metal.models.rope_parameters import rotated_share, scaling
from vllm_metal.models.weight_files import ModelLoadError


def mend_ropes(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replaces them where the config asks for others: scaled, or of a share of each head.

    The new ones are those that mlx-lm's other modules have for such a configuration.

    Args:
        model: as mlx-lm makes it.
        config: of config.json.

    Raises:
        ModelLoadError: mlx-lm knows no such scaling.
    """
    words = config.get("text_config") or config
    scaled, share = scaling(words), rotated_share(words)
    for _, layer in model.named_modules():
        module = type(layer).__module__.rpartition(".")[2]
        rope = layer.get("rope")
        if type(rope) is not nn.RoPE:
            continue
        scales = scaled if module in UNSCALED else None
        turns = share if module in PARTIAL else 1.0
        if scales is None and turns == 1.0:
            continue
        try:
            layer.rope = rope_utils.initialize_rope(
                int(rope.dims * turns),
                rope.base,
                rope.traditional,
                scales,
                words.get("max_position_embeddings"),
            )
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"the rope that config.json asks for: {error}") from error
