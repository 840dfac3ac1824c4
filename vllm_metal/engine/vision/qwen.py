# SPDX-License-Identifier: Apache-2.0
"""The tower of Qwen3-VL and Qwen3.5: patches of any grid, merged by squares, with DeepStack."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import mlx.core as mx

from vllm_metal.engine.vision.tower import Config, Tower
from vllm_metal.patches.mlx_patches import mlx_vlm_families

#: The processor's output that holds the pixels, by modality.
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class QwenTower(Tower):
    """mlx-vlm's vision model of Qwen3-VL."""

    parts: ClassVar[Mapping[str, str]] = {
        "model.visual": "vision_tower",
        "model.language_model.visual": "vision_tower",
        "visual": "vision_tower",
        "vision_tower": "vision_tower",
    }

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family("qwen3_vl", "an image")
        vision = {**config["vision_config"], "model_type": "qwen3_vl"}
        self.check_fixed(vision, hidden_act="gelu_pytorch_tanh")
        vision["deepstack_visual_indexes"] = vision.get("deepstack_visual_indexes") or []
        self.vision_tower = module.VisionModel(module.VisionConfig.from_dict(vision))
        self.levels = len(vision["deepstack_visual_indexes"])

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        pixels = data[_PIXELS[modality]]
        grid = data[f"{modality}_grid_thw"].reshape(1, 3)
        dtype = self.vision_tower.patch_embed.proj.weight.dtype
        rows, levels = self.vision_tower(pixels.astype(dtype), grid)
        return mx.stack([rows, *levels], axis=1)

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        config = self.vision_tower.config
        side = math.isqrt(max(rows, 1)) * config.spatial_merge_size
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = mx.array([1, side, side], mx.int32)
        return {"pixel_values": mx.zeros((side * side, width)), "image_grid_thw": grid}
