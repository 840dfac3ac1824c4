# SPDX-License-Identifier: Apache-2.0
"""Inkling's tower: each patch of an image by itself, folded and projected to one token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import mlx.core as mx
from transformers import PreTrainedConfig

from vllm_metal.engine.vision.tower import Config, Tower
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_families

#: Names in Inkling's own checkpoints, and mlx-vlm's.
_NAMES = (
    (re.compile(r"\.layers\.linear_(\d+)\."), r".encoder_layers.\1.projection."),
    (re.compile(r"\.layers\.norm_(\d+)\."), r".encoder_layers.\1.layer_norm."),
)
#: Keys of Inkling's own vision_config, and those of transformers.
_KEYS: Mapping[str, str] = MappingProxyType(
    {"n_channels": "num_channels", "num_hidden_layers": "n_layers"}
)
#: The only values of keys that neither vLLM's class nor transformers' reads otherwise.
_FIXED = {"vision_encoder_type": "hmlp", "use_vision_norm": True, "rms_norm_eps": 1e-6}
#: Keys that mlx-vlm's class reads.
_READ = ("patch_size", "temporal_patch_size", "num_channels", "n_layers")
#: Keys without effect, also in transformers' class and vLLM's; the width is the text model's.
_INERT = (
    *("decoder_dmodel", "text_hidden_size", "hidden_size", "num_attention_heads"),
    "initializer_range",
)
#: Ids that vLLM's processor writes into prompts, whatever config.json states.
_TOKENS = {"image_bos_token_id": 200005, "image_token_id": 200054}
_PATCHES = 256  # computed together, to limit memory


class InklingTower(Tower):
    """mlx-vlm's vision model of Inkling."""

    parts: ClassVar[Mapping[str, str]] = {
        "model.visual": "vision_tower",
        "model.vision_tower": "vision_tower",
        "vision_tower": "vision_tower",
    }

    def __init__(self, config: Config) -> None:
        super().__init__()
        module = mlx_vlm_families.family("inkling", "an image")
        stated = config["vision_config"].items()
        vision = {_KEYS.get(key, key): value for key, value in stated if value is not None}
        self.check_fixed(vision, **_FIXED)
        self.check_fixed(config, **_TOKENS)
        known = {*_READ, *_FIXED, *_INERT, *PreTrainedConfig().to_dict()}
        if unknown := [key for key, value in vision.items() if key not in known and value]:
            raise ModelLoadError(
                f"config.json sets vision_config.{unknown[0]}={vision[unknown[0]]!r}, which the "
                "vision tower does not read. Serve the text with --language-model-only"
            )
        given = {key: vision[key] for key in _READ if key in vision}
        width = config["text_config"]["hidden_size"]
        self._config = module.VisionConfig(**given, text_hidden_size=width)
        self.vision_tower = module.vision.VisionModel(self._config)

    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """Encodes an image some patches after the other, which limits peak memory; see Tower."""
        pixels = data["pixel_values"]  # [n, T, height, width, C]
        pixels = pixels.astype(self.vision_tower.final_norm.weight.dtype)
        rows: list[mx.array] = []
        for start in range(0, len(pixels), _PATCHES):
            patches = pixels[start : start + _PATCHES]
            if rows:
                patches = mx.depends(patches, rows[-1])
            rows.append(self.vision_tower(patches))
        return mx.concatenate(rows)[:, None]

    def sample(self, rows: int) -> Mapping[str, mx.array]:
        config = self._config
        side = config.patch_size
        shape = max(rows, 1), config.temporal_patch_size, side, side, config.num_channels
        return {"pixel_values": mx.zeros(shape)}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        found: dict[str, mx.array] = {}
        for name, array in weights.items():
            for pattern, replacement in _NAMES:
                name = pattern.sub(replacement, name)
            found[name] = array
        return super().sanitize(found)
