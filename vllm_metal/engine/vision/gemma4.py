# SPDX-License-Identifier: Apache-2.0
"""The tower of Gemma 4: patches of any grid, averaged by squares, and a projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx
import numpy as np

from vllm_metal.engine.models import mlx_vlm_families
from vllm_metal.engine.vision.tower import Config, Tower


class Gemma4Tower(Tower):
    """mlx-vlm's layers, pooler and projection of Gemma 4's images."""

    parts: ClassVar[Mapping[str, str]] = {
        "model.vision_tower": "vision_tower",
        "vision_tower": "vision_tower",
        "model.embed_vision": "embed_vision",
        "embed_vision": "embed_vision",
    }

    def __init__(self, config: Config) -> None:
        """
        Args:
            config: of the whole model.
        """
        super().__init__()
        module = mlx_vlm_families.family("gemma4", "an image")
        vision = dict(config["vision_config"])
        self.check_fixed(vision, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        of_tower = module.VisionConfig.from_dict(vision)
        self.vision_tower = module.VisionModel(of_tower)
        self.embed_vision = module.gemma4.MultimodalEmbedder(
            of_tower.hidden_size, config["text_config"]["hidden_size"], of_tower.rms_norm_eps
        )

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """See Tower; the patches that fill an image up to the largest are left out."""
        tower = self.vision_tower
        positions = data["pixel_position_ids"]  # [L, 2], x and y; -1 of what fills up
        kept = mx.array(np.flatnonzero(np.array(positions)[:, 0] >= 0))
        places, pixels = positions[kept].astype(mx.int32), data["pixel_values"][kept]
        embedder, dtype = tower.patch_embedder, tower.patch_embedder.input_proj.weight.dtype
        table = embedder.position_embedding_table
        states = embedder.input_proj((2 * (pixels - 0.5)).astype(dtype))
        states = states + table[0][places[:, 0]] + table[1][places[:, 1]]
        states = tower.encoder(states[None], places[None], None)
        rows, _ = tower.pooler(  # in float32: the shift below takes two large numbers apart
            states.astype(mx.float32),
            places[None],
            mx.zeros((1, len(places)), mx.bool_),
            len(places) // tower.pooling_kernel_size**2,
        )
        if tower.config.standardize:
            rows = (rows - tower.std_bias) * tower.std_scale
        embedded: mx.array = self.embed_vision(rows[0].astype(dtype))
        return embedded[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        """See Tower; they lie beside each other, so that there are as many as asked for."""
        vision = self.vision_tower.config
        side = vision.pooling_kernel_size
        y, x = np.indices((side, rows * side), np.int32).reshape(2, -1)
        return {
            "pixel_values": mx.zeros((len(x), 3 * vision.patch_size**2)),
            "pixel_position_ids": mx.array(np.stack([x, y], axis=1)),
        }
