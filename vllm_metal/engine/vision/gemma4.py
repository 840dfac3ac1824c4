# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's tower: patches of any grid, averaged over squares, and a projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx
import numpy as np

from vllm_metal.engine.vision.tower import Config, Tower
from vllm_metal.patches.mlx_patches import mlx_vlm_families


class Gemma4Tower(Tower):
    """mlx-vlm's vision layers, pooler and projection of Gemma 4."""

    parts: ClassVar[Mapping[str, str]] = {
        "model.vision_tower": "vision_tower",
        "vision_tower": "vision_tower",
        "model.embed_vision": "embed_vision",
        "embed_vision": "embed_vision",
    }

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family("gemma4", "an image")
        vision = dict(config["vision_config"])
        self.check_fixed(vision, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        tower_config = module.VisionConfig.from_dict(vision)
        self.vision_tower = module.VisionModel(tower_config)
        self.embed_vision = module.gemma4.MultimodalEmbedder(
            tower_config.hidden_size,
            config["text_config"]["hidden_size"],
            tower_config.rms_norm_eps,
        )

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """Encodes an image, and drops the patches that pad it to the largest size; see Tower."""
        tower = self.vision_tower
        positions = data["pixel_position_ids"]  # [L, 2], x and y; -1 for padding
        unpadded = mx.array(np.flatnonzero(np.array(positions)[:, 0] >= 0))
        xy, pixels = positions[unpadded].astype(mx.int32), data["pixel_values"][unpadded]
        embedder, dtype = tower.patch_embedder, tower.patch_embedder.input_proj.weight.dtype
        table = embedder.position_embedding_table
        states = embedder.input_proj((2 * (pixels - 0.5)).astype(dtype))
        states = states + table[0][xy[:, 0]] + table[1][xy[:, 1]]
        states = tower.encoder(states[None], xy[None], None)
        rows, _ = tower.pooler(  # in float32: the shift below subtracts two large numbers
            states.astype(mx.float32),
            xy[None],
            mx.zeros((1, len(xy)), mx.bool_),
            len(xy) // tower.pooling_kernel_size**2,
        )
        if tower.config.standardize:
            rows = (rows - tower.std_bias) * tower.std_scale
        embedded: mx.array = self.embed_vision(rows[0].astype(dtype))
        return embedded[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        # One strip of squares yields exactly as many rows as asked for.
        vision = self.vision_tower.config
        side = vision.pooling_kernel_size
        y, x = np.indices((side, rows * side), np.int32).reshape(2, -1)
        return {
            "pixel_values": mx.zeros((len(x), 3 * vision.patch_size**2)),
            "pixel_position_ids": mx.array(np.stack([x, y], axis=1)),
        }
