# SPDX-License-Identifier: Apache-2.0
"""Families whose images are served: which tower, and what the text model needs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_metal.engine.vision.gemma import GemmaTower
from vllm_metal.engine.vision.gemma4 import Gemma4Tower
from vllm_metal.engine.vision.lfm2 import Lfm2Tower
from vllm_metal.engine.vision.pixtral import MistralTower, PixtralTower
from vllm_metal.engine.vision.qwen import QwenTower
from vllm_metal.engine.vision.tower import Config, Tower


@dataclass(frozen=True)
class VisionFamily:
    """What is particular to a family."""

    tower: Callable[[Config], Tower]  # of the configuration of the whole model
    mrope: bool = False  # rows of images have three positions
    whole: bool = False  # rows of an image see each other whatever their order
    #: They do so within the window of layers that have one, where the configuration says so.
    windowed: bool = False
    #: Layers have embeddings of their own of tokens; a row of an image has those of padding.
    padded: bool = False
    scaled: bool = False  # the text model multiplies embeddings with sqrt(H), those of images not


#: By `model_type` of config.json.
FAMILIES = {
    "gemma3": VisionFamily(GemmaTower, whole=True, scaled=True),
    "gemma4": VisionFamily(Gemma4Tower, whole=True, windowed=True, padded=True, scaled=True),
    "lfm2_vl": VisionFamily(Lfm2Tower),
    "llava": VisionFamily(PixtralTower),  # with the tower of Pixtral alone
    "mistral3": VisionFamily(MistralTower),
    "qwen3_5": VisionFamily(QwenTower, mrope=True),
    "qwen3_5_moe": VisionFamily(QwenTower, mrope=True),
    "qwen3_vl": VisionFamily(QwenTower, mrope=True),
    "qwen3_vl_moe": VisionFamily(QwenTower, mrope=True),
}
