# SPDX-License-Identifier: Apache-2.0
"""Vision towers of Pixtral (any grid of patches) and Mistral 3 (whose projector merges patches)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.vision.tower import Config, Tower, with_projector
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_families


class PixtralTower(Tower):
    """mlx-vlm's Pixtral vision model and LLaVA's projector, which makes one token per patch."""

    parts: ClassVar[Mapping[str, str]] = with_projector("vision_tower.vision_model")
    family: ClassVar[str] = "pixtral"  # mlx-vlm's name

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family(self.family, "an image")
        vision = dict(config["vision_config"])
        self.check_fixed(vision, model_type="pixtral", hidden_act="silu")
        self.check_fixed(config, projector_hidden_act="gelu", vision_feature_select_strategy="full")
        vision["head_dim"] = vision.get("head_dim") or (
            vision["hidden_size"] // vision["num_attention_heads"]
        )
        rope = vision.get("rope_parameters") or {}
        vision["rope_theta"] = rope.get("rope_theta", vision.get("rope_theta", 10000.0))
        self._layer = config["vision_feature_layer"]
        if not isinstance(self._layer, int):
            raise ModelLoadError(
                f"vision_feature_layer={self._layer} is not supported: only a single layer is"
            )
        of_tower = module.VisionConfig.from_dict(vision)
        self.vision_tower = module.VisionModel(of_tower)
        self.multi_modal_projector = self.projector(module, of_tower, config)

    def projector(self, module: ModuleType, of_tower: Any, config: Config) -> nn.Module:
        """Builds the module that maps patches to embeddings; `of_tower` is mlx-vlm's config."""
        self.check_fixed(config, multimodal_projector_bias=True)
        size = SimpleNamespace(hidden_size=config["text_config"]["hidden_size"])
        made: nn.Module = module.pixtral.LlavaMultiModalProjector(
            SimpleNamespace(vision_config=of_tower, text_config=size)
        )
        return made

    @property
    def merged(self) -> int:
        """Patches along each side of the square that becomes one token."""
        return 1

    def project(self, states: mx.array, height: int, width: int) -> mx.array:
        """Maps [patches, D] of an image, whose size is in pixels, to embeddings [n, H]."""
        rows: mx.array = self.multi_modal_projector(states)
        return rows

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        pixels = data["pixel_values"]  # [C, height, width]
        _, height, width = pixels.shape
        *_, states = self.vision_tower(
            pixels[None].transpose(0, 2, 3, 1),
            output_hidden_states=True,
            image_sizes=[(height, width)],
        )
        return self.project(states[self._layer][0], height, width)[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        vision = self.vision_tower.vision_model.config
        pixels = vision.patch_size * self.merged
        most = max(vision.image_size // pixels, 1)
        side = min(math.isqrt(max(rows, 1)), most) * pixels
        return {"pixel_values": mx.zeros((vision.num_channels, side, side))}


class MistralTower(PixtralTower):
    """Pixtral's tower with Mistral 3's projector."""

    family: ClassVar[str] = "mistral3"

    def projector(self, module: ModuleType, of_tower: Any, config: Config) -> nn.Module:
        text = config["text_config"]
        made: nn.Module = module.mistral3.Mistral3MultiModalProjector(
            SimpleNamespace(
                vision_config=of_tower,
                text_config=SimpleNamespace(
                    rms_norm_eps=text["rms_norm_eps"], hidden_size=text["hidden_size"]
                ),
                spatial_merge_size=config["spatial_merge_size"],
                vision_feature_layer=self._layer,
                multimodal_projector_bias=config["multimodal_projector_bias"],
            )
        )
        return made

    @property
    def merged(self) -> int:
        merger: Any = self.multi_modal_projector
        return int(merger.patch_merger.spatial_merge_size)

    def project(self, states: mx.array, height: int, width: int) -> mx.array:
        rows: mx.array = self.multi_modal_projector(states, [(height, width)])
        return rows
