# SPDX-License-Identifier: Apache-2.0
"""Loads a model's vision tower and connects it to the text model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_lm.utils import load_config

from vllm_metal.engine.models import loader
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.vision import deepstack, rotation
from vllm_metal.engine.vision.column import Axes, ImageColumn
from vllm_metal.engine.vision.encoder import Encoder
from vllm_metal.engine.vision.families import FAMILIES, VisionFamily
from vllm_metal.engine.vision.tower import Config, load_weights
from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def load(config: VllmConfig, text: ModelParts) -> ImageColumn:
    """Loads the tower of a checkpoint and returns the column that feeds images to its text model.

    Raises:
        ModelLoadError: the family's images are not supported, or the tower cannot be loaded.
        ImportError: mlx-vlm is not installed.
    """
    name = loader.model_type(config)
    if name not in FAMILIES:
        raise ModelLoadError(
            f"images of {name!r} are not served: serve its text with --language-model-only"
        )
    family, model_config = FAMILIES[name], config.model_config.hf_config.to_dict()
    folder = model_files.model_folder(config.model_config, config)
    dtype = loader.mlx_dtype(config)
    tower = family.tower(model_config)
    load_weights(tower, folder, dtype, load_config(folder))
    return fitted(Encoder(tower, dtype), text, model_config, family)


def fitted(encoder: Encoder, text: ModelParts, config: Config, family: VisionFamily) -> ImageColumn:
    """Connects a tower to a text model and patches the model's layers for image tokens."""
    _check_window(config, family)
    deepstack.put_in(text.model, encoder.tower.levels)
    axes = None
    if family.mrope:
        sections = config["text_config"]["rope_parameters"]["mrope_section"]
        merge_size = config["vision_config"]["spatial_merge_size"]
        axes = Axes(rotation.put_in(text.model, sections), merge_size, sections)
    scale = config["text_config"]["hidden_size"] ** 0.5 if family.scaled else 1.0
    whole = family.whole
    if family.windowed:
        whole = config["text_config"].get("use_bidirectional_attention") == "vision"
    padding = config["text_config"]["pad_token_id"] if family.padded else None
    return ImageColumn(encoder, text.embed, axes, scale, whole, family.windowed, padding)


def _check_window(config: Config, family: VisionFamily) -> None:
    # In windowed layers an image's tokens see each other only within the window. No published
    # model has a window smaller than an image.
    window, rows = config["text_config"].get("sliding_window"), config.get("mm_tokens_per_image")
    if family.whole and not family.windowed and window and rows and window < rows:
        raise ModelLoadError(
            f"sliding_window={window} is not supported with images of {rows} tokens "
            "(mm_tokens_per_image): an image must fit into the window. Serve the text "
            "with --language-model-only."
        )
