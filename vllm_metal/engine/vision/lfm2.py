# SPDX-License-Identifier: Apache-2.0
"""LFM2-VL's tower: SigLIP 2 over tiles and a thumbnail of any grid, then pixel unshuffle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import ClassVar

import mlx.core as mx
import numpy as np

from vllm_metal.engine.vision.tower import Config, Tower, with_projector
from vllm_metal.patches.mlx_patches import mlx_vlm_families


class Lfm2Tower(Tower):
    """mlx-vlm's vision model and projector of LFM2-VL."""

    parts: ClassVar[Mapping[str, str]] = with_projector("vision_tower")
    unread = ("vision_tower.head.",)  # makes SigLIP's own pooled output

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family("lfm2_vl", "an image")
        vision = {**config["vision_config"], "model_type": "siglip2_vision_model"}
        self.check_fixed(vision, hidden_act="gelu_pytorch_tanh")
        self.check_fixed(config, projector_hidden_act="gelu", vision_feature_layer=-1)
        tower_config = module.VisionConfig.from_dict(vision)
        self._factor = config["downsample_factor"]
        self.vision_tower = module.VisionModel(tower_config)
        self.pixel_unshuffle = module.lfm2_vl.PixelUnshuffleBlock(self._factor)
        projector_config = SimpleNamespace(
            vision_config=tower_config,
            text_config=SimpleNamespace(hidden_size=config["text_config"]["hidden_size"]),
            downsample_factor=self._factor,
            projector_hidden_size=config["projector_hidden_size"],
            projector_bias=config.get("projector_bias", True),
            projector_use_layernorm=config.get("projector_use_layernorm", True),
        )
        self.multi_modal_projector = module.lfm2_vl.Lfm2VlMultiModalProjector(projector_config)

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """Encodes an image's views one after the other, which limits peak memory; see Tower."""
        views: list[mx.array] = []
        shapes = np.array(data["spatial_shapes"]).reshape(-1, 2).tolist()
        for padded, (height, width) in zip(data["pixel_values"], shapes, strict=True):
            patches = padded[None, : height * width]  # [1, n, C * patch_size**2]
            if views:
                patches = mx.depends(patches, views[-1])
            *_, states = self.vision_tower(patches, spatial_shapes=mx.array([[height, width]]))
            merged = self.pixel_unshuffle(states.reshape(1, height, width, -1))
            views.append(self.multi_modal_projector(merged).flatten(0, 2))
        return mx.concatenate(views)[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        config = self.vision_tower.embeddings.config
        side = math.isqrt(max(rows, 1)) * self._factor
        width = config.num_channels * config.patch_size**2
        return {
            "pixel_values": mx.zeros((1, side * side, width)),
            "spatial_shapes": mx.array([[side, side]], mx.int32),
        }
