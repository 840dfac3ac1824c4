# SPDX-License-Identifier: Apache-2.0
"""Makes Cohere Compass rotate as transformers does, and project all texts of a step at once.

mlx-vlm's module rotates with frequencies in their usual order and assigns each to an axis of images
in turns. The model was trained with those of images' axes in another order, one section per axis
(transformers' `CohereCompassRotaryEmbedding`), which differs for text as well.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.replacing import after_init

#: transformers' default number of frequencies for height, width and time.
_SECTIONS = (22, 22, 20)


def language(module: ModuleType) -> None:
    """Patches the order of frequencies, for text, and projections of several texts."""

    def reorder(rope: Any, config: Any, layer_type: str | None = None) -> None:
        if not rope.enabled:
            return
        parameters = config.rope_parameters or {}
        sections = parameters.get(layer_type, parameters).get("mrope_section") or _SECTIONS
        size = rope._inv_freq.size
        if sum(sections) != size:
            raise ValueError(
                f"mrope_section={list(sections)} of config.json is not supported: its sum is "
                f"{sum(sections)}, expected {size}. Choose another checkpoint"
            )
        of_images = size - sections[2]
        order = [*range(0, of_images, 2), *range(1, of_images, 2), *range(of_images, size)]
        rope._inv_freq = rope._inv_freq[mx.array(order)]
        # All axes of a text's position are the same.
        rope.mrope_section = rope._position_selector = None

    after_init(module.CompassRotaryEmbedding, reorder)
    # mlx-vlm calls a projection once per text, so that its results do not depend on the batch.
    module._rowwise_batch = lambda project, x: project(x)  # type: ignore[attr-defined]
