# SPDX-License-Identifier: Apache-2.0
"""Model families with image support: their tower and what the text model needs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_metal.engine.vision.gemma import GemmaTower
from vllm_metal.engine.vision.gemma4 import Gemma4Tower
from vllm_metal.engine.vision.inkling import InklingTower
from vllm_metal.engine.vision.lfm2 import Lfm2Tower
from vllm_metal.engine.vision.pixtral import MistralTower, PixtralTower
from vllm_metal.engine.vision.qwen import QwenTower
from vllm_metal.engine.vision.tower import Config, Tower


@dataclass(frozen=True)
class VisionFamily:
    """A family's tower, and how its text model handles image tokens."""

    tower: Callable[[Config], Tower]  # takes the whole model's configuration
    mrope: bool = False  # image tokens have three positions
    whole: bool = False  # an image's tokens attend to each other bidirectionally
    #: They do so only within sliding windows, if the configuration asks for it.
    windowed: bool = False
    #: Layers have per-layer token embeddings; image tokens use those of the padding token.
    padded: bool = False
    scaled: bool = False  # the text model multiplies text embeddings by sqrt(H), images' not


#: By `model_type` of config.json.
FAMILIES = {
    "gemma3": VisionFamily(GemmaTower, whole=True, scaled=True),
    "gemma4": VisionFamily(Gemma4Tower, whole=True, windowed=True, padded=True, scaled=True),
    "inkling_mm_model": VisionFamily(InklingTower),
    "lfm2_vl": VisionFamily(Lfm2Tower),
    "llava": VisionFamily(PixtralTower),  # only LLaVA models with Pixtral's tower
    "mistral3": VisionFamily(MistralTower),
    "qwen3_5": VisionFamily(QwenTower, mrope=True),
    "qwen3_5_moe": VisionFamily(QwenTower, mrope=True),
    "qwen3_vl": VisionFamily(QwenTower, mrope=True),
    "qwen3_vl_moe": VisionFamily(QwenTower, mrope=True),
}
