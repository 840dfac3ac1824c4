# SPDX-License-Identifier: Apache-2.0
"""The tower of Mistral 3: Pixtral's, patches of any grid, and a projector that merges squares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import ClassVar

import mlx.core as mx

from vllm_metal.models import mlx_vlm_families
from vllm_metal.models.weight_files import ModelLoadError
from vllm_metal.vision.tower import Config, Tower, with_projector


class MistralTower(Tower):
    """mlx-vlm's vision model of Pixtral, and Mistral 3's projector."""

    parts: ClassVar[Mapping[str, str]] = with_projector("vision_tower.vision_model")

    def __init__(self, config: Config) -> None:
        """
        Args:
            config: of the whole model.

        Raises:
            ModelLoadError: the projector reads several layers of the tower.
        """
        super().__init__()
        module = mlx_vlm_families.family("mistral3", "an image")
        vision = dict(config["vision_config"])
        self.check_fixed(vision, hidden_act="silu")
        vision["head_dim"] = vision.get("head_dim") or (
            vision["hidden_size"] // vision["num_attention_heads"]
        )
        rope = vision.get("rope_parameters") or {}
        vision["rope_theta"] = rope.get("rope_theta", vision.get("rope_theta", 10000.0))
        self._layer = config["vision_feature_layer"]
        if not isinstance(self._layer, int):
            raise ModelLoadError(f"vision_feature_layer {self._layer}: one layer's is served")
        of_tower = module.VisionConfig.from_dict(vision)
        self.vision_tower = module.VisionModel(of_tower)
        text = config["text_config"]
        of_projector = SimpleNamespace(
            vision_config=of_tower,
            text_config=SimpleNamespace(
                rms_norm_eps=text["rms_norm_eps"], hidden_size=text["hidden_size"]
            ),
            spatial_merge_size=config["spatial_merge_size"],
            vision_feature_layer=self._layer,
            multimodal_projector_bias=config["multimodal_projector_bias"],
        )
        self.check_fixed(config, projector_hidden_act="gelu")
        self.multi_modal_projector = module.mistral3.Mistral3MultiModalProjector(of_projector)

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """See Tower."""
        pixels = data["pixel_values"]  # [C, height, width]
        sizes = [pixels.shape[1:]]
        *_, states = self.vision_tower(
            pixels[None].transpose(0, 2, 3, 1), output_hidden_states=True, image_sizes=sizes
        )
        rows: mx.array = self.multi_modal_projector(states[self._layer][0], sizes)
        return rows[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        """See Tower."""
        vision = self.vision_tower.vision_model.config
        merged = vision.patch_size * self.multi_modal_projector.patch_merger.spatial_merge_size
        most = max(vision.image_size // merged, 1)
        side = min(math.isqrt(max(rows, 1)), most) * merged
        return {"pixel_values": mx.zeros((vision.num_channels, side, side))}
