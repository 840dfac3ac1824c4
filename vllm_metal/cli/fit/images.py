# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory for images: the vision tower's weights and forwards, and embeddings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from vllm_metal.engine.vision.families import FAMILIES
from vllm_metal.engine.weights.files import stored_arrays
from vllm_metal.patches.vllm_patches import inkling_images

# The engine measures these with vLLM's processor of the family (vision/room.py); here they follow
# from config.json and the processor's files.

#: Default of the maximum pixels of an image or video, as in transformers' processors for Qwen.
_QWEN_PIXELS = 16384 * 32 * 32
#: Files with a processor's settings; the first one with a `size` counts.
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Images:
    """The memory that a model needs for images; sizes in bytes."""

    weights: int  # weights of the vision tower
    rows: int  # tokens of the largest image or video
    row_bytes: int  # embedding bytes per token
    patch_bytes: int  # the tower's working memory per patch
    patches: int  # per token

    @staticmethod
    def read(folder: Path, dtype: mx.Dtype) -> Images | None:
        """Reads a model's files; None if the engine would serve no images.

        Only the headers of weight files are read.
        """
        config = json.loads((folder / "config.json").read_text())
        family = FAMILIES.get(config["model_type"])
        if family is None or find_spec("mlx_vlm") is None:
            return None
        parts = tuple(f"{name}." for name in cast(Any, family.tower).parts)
        arrays = [array for name, array in stored_arrays(folder) if name.startswith(parts)]
        if not arrays:
            return None
        vision, text = config["vision_config"], config.get("text_config", config)
        rows, patches = _largest(folder, config, vision)
        levels = len(vision.get("deepstack_visual_indexes") or ())
        return Images(
            weights=sum(_loaded_bytes(array, dtype) for array in arrays),
            rows=rows,
            row_bytes=(1 + levels) * text["hidden_size"] * dtype.size,
            patch_bytes=_patch_bytes(vision, dtype),
            patches=patches,
        )

    def extra_bytes(self, max_num_batched_tokens: int) -> int:
        """Returns the bytes needed in addition to weights and pool."""
        # vLLM's scheduler keeps the embeddings of a step, or of one image if that is larger.
        kept = max(self.rows, max_num_batched_tokens) * self.row_bytes
        return kept + self.rows * self.patches * self.patch_bytes


def _loaded_bytes(array: mx.array, dtype: mx.Dtype) -> int:
    # The loader converts floating-point arrays to the engine's dtype.
    return array.size * dtype.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def _largest(folder: Path, config: Mapping[str, Any], vision: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the tokens of the largest image or video, and patches per token."""
    if "mm_tokens_per_image" in config:
        rows = int(config["mm_tokens_per_image"])
        return rows, -(-((vision["image_size"] // vision["patch_size"]) ** 2) // rows)
    if config["model_type"] == "gemma4":
        return vision.get("default_output_length", 280), vision["pooling_kernel_size"] ** 2
    if config["model_type"] == "inkling_mm_model":
        edge = _processor_value(folder, "rescale_image_max_upscaled_long_edge", 0)
        return inkling_images.most_tokens(edge, vision["patch_size"]), 1
    if "downsample_factor" in config:
        return _processor_value(folder, "max_image_tokens", 256), config["downsample_factor"] ** 2
    merge = config.get("spatial_merge_size") or vision.get("spatial_merge_size") or 1
    side, sizes = vision["patch_size"] * merge, _sizes(folder)
    if config["model_type"] in ("mistral3", "llava"):
        longest = sizes.get(FILES[0], {}).get("longest_edge", vision["image_size"])
        return (longest // side) ** 2, merge**2
    image = sizes.get(FILES[0], {}).get("longest_edge", _QWEN_PIXELS)
    video = sizes.get(FILES[2], {}).get("longest_edge", 0) // vision["temporal_patch_size"]
    return max(image, video) // side**2, merge**2


def _processor_value(folder: Path, key: str, default: int) -> int:
    for content in _contents(folder).values():
        if key in content:
            return int(content[key])
    return default


def _sizes(folder: Path) -> dict[str, Mapping[str, int]]:
    return {
        name: content["size"]
        for name, content in _contents(folder).items()
        if isinstance(content.get("size"), Mapping)
    }


def _contents(folder: Path) -> dict[str, Mapping[str, Any]]:
    found = {}
    for name in FILES:
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            found[name] = content.get("image_processor", content)
    return found


def _patch_bytes(vision: Mapping[str, Any], dtype: mx.Dtype) -> int:
    channels = vision.get("in_channels") or vision.get("num_channels") or 3
    pixels = channels * vision["patch_size"] ** 2 * vision.get("temporal_patch_size", 1)
    if "intermediate_size" not in vision:  # Inkling's: a layer's input and output, and its copies
        return 4 * pixels + 8 * pixels * dtype.size
    # Per patch: the most that a layer holds, and the pixels for the convolution. MLX's convolution
    # copies its input, and writes each patch as a row of a matrix.
    elements = 3 * vision["intermediate_size"] + 8 * vision["hidden_size"]
    if vision.get("model_type") == "gemma4_vision":  # heads are padded to sizes with fused kernels
        elements += 4 * vision["num_attention_heads"] * vision["head_dim"]
    return elements * dtype.size + 3 * 4 * pixels
