# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's tower: SigLIP over fixed-size squares and a projector that pools patches."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import ClassVar

import mlx.core as mx

from vllm_metal.engine.vision.tower import Config, Tower, with_projector
from vllm_metal.patches.mlx_patches import mlx_vlm_families


class GemmaTower(Tower):
    """mlx-vlm's vision model and projector of Gemma 3."""

    parts: ClassVar[Mapping[str, str]] = with_projector("vision_tower.vision_model")
    unread = ("vision_tower.vision_model.head.",)  # makes SigLIP's own pooled output

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family("gemma3", "an image")
        vision = {**config["vision_config"], "model_type": "siglip_vision_model"}
        self.check_fixed(vision, hidden_act="gelu_pytorch_tanh")
        tower_config = module.VisionConfig.from_dict(vision)
        self._square = tower_config.num_channels, tower_config.image_size, tower_config.image_size
        self.vision_tower = module.VisionModel(tower_config)
        # mlx-vlm leaves its last norm at MLX's default.
        self.vision_tower.vision_model.post_layernorm.eps = tower_config.layer_norm_eps
        text = SimpleNamespace(
            hidden_size=config["text_config"]["hidden_size"],
            mm_tokens_per_image=config["mm_tokens_per_image"],
        )
        projector_config = SimpleNamespace(vision_config=tower_config, text_config=text)
        self.multi_modal_projector = module.gemma3.Gemma3MultiModalProjector(projector_config)

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """Encodes an image and its crops, in this order; see Tower."""
        pixels = data["pixel_values"]  # [n, C, height, width]
        weight = self.vision_tower.vision_model.embeddings.patch_embedding.weight
        states, *_ = self.vision_tower(pixels.transpose(0, 2, 3, 1).astype(weight.dtype))
        rows: mx.array = self.multi_modal_projector(states)
        return rows.flatten(0, 1)[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        return {"pixel_values": mx.zeros((1, *self._square))}
