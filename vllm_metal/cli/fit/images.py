# SPDX-License-Identifier: Apache-2.0
"""What a model's images take of memory: the tower's weights, rows that are kept, and its work.

The engine measures the latter with vLLM's processor of the family (vision/room.py); here they
follow from config.json and the processor's files.
"""

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

#: Pixels of an image and a video where no file says it, as transformers' processors of Qwen's have.
_QWEN_PIXELS = 16384 * 32 * 32
#: The files that say it, the first that has a `size` counts.
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class Images:
    """Images of a model. Sizes are bytes."""

    weights: int  # of the tower
    rows: int  # of the largest image or video
    row_bytes: int  # of its embeddings
    patch_bytes: int  # of the tower's work, by patch
    patches: int  # of a row

    @staticmethod
    def read(folder: Path, dtype: mx.Dtype) -> Images | None:
        """None where an engine would serve no images: of the family, or without mlx-vlm.

        Args:
            folder: of the model; of weight files only headers are read.
            dtype: of the engine.
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
            weights=sum(_held(array, dtype) for array in arrays),
            rows=rows,
            row_bytes=(1 + levels) * text["hidden_size"] * dtype.size,
            patch_bytes=_work(vision, dtype),
            patches=patches,
        )

    def beside(self, max_num_batched_tokens: int) -> int:
        """Bytes beside weights and pool: vLLM's scheduler keeps rows of a step, or of an image."""
        kept = max(self.rows, max_num_batched_tokens) * self.row_bytes
        return kept + self.rows * self.patches * self.patch_bytes


def _held(array: mx.array, dtype: mx.Dtype) -> int:
    """Bytes as the loader holds it: numbers in the engine's dtype."""
    return array.size * dtype.size if mx.issubdtype(array.dtype, mx.floating) else array.nbytes


def _largest(folder: Path, config: Mapping[str, Any], vision: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of the largest image or video, and patches of a row."""
    if "mm_tokens_per_image" in config:
        rows = int(config["mm_tokens_per_image"])
        return rows, -(-((vision["image_size"] // vision["patch_size"]) ** 2) // rows)
    if config["model_type"] == "gemma4":
        return vision.get("default_output_length", 280), vision["pooling_kernel_size"] ** 2
    if "downsample_factor" in config:
        return _of_processor(folder, "max_image_tokens", 256), config["downsample_factor"] ** 2
    merge = config.get("spatial_merge_size") or vision.get("spatial_merge_size") or 1
    side, sizes = vision["patch_size"] * merge, _sizes(folder)
    if config["model_type"] in ("mistral3", "llava"):
        longest = sizes.get(FILES[0], {}).get("longest_edge", vision["image_size"])
        return (longest // side) ** 2, merge**2
    image = sizes.get(FILES[0], {}).get("longest_edge", _QWEN_PIXELS)
    video = sizes.get(FILES[2], {}).get("longest_edge", 0) // vision["temporal_patch_size"]
    return max(image, video) // side**2, merge**2


def _of_processor(folder: Path, key: str, default: int) -> int:
    """A number that a processor's file says, the first that has it."""
    for content in _contents(folder).values():
        if key in content:
            return int(content[key])
    return default


def _sizes(folder: Path) -> dict[str, Mapping[str, int]]:
    """The processor's `size` by file."""
    return {
        name: content["size"]
        for name, content in _contents(folder).items()
        if isinstance(content.get("size"), Mapping)
    }


def _contents(folder: Path) -> dict[str, Mapping[str, Any]]:
    """What the files say of images or videos, by file."""
    found = {}
    for name in FILES:
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            found[name] = content.get("image_processor", content)
    return found


def _work(vision: Mapping[str, Any], dtype: mx.Dtype) -> int:
    """Bytes of a patch: what a layer holds of it at most; its pixels, as a convolution takes them.

    MLX's convolution copies what it gets, and writes each patch as a row of a matrix.
    """
    channels = vision.get("in_channels") or vision.get("num_channels") or 3
    pixels = channels * vision["patch_size"] ** 2 * vision.get("temporal_patch_size", 1)
    held = 3 * vision["intermediate_size"] + 8 * vision["hidden_size"]
    if vision.get("model_type") == "gemma4_vision":  # heads are filled up to sizes that MLX fuses
        held += 4 * vision["num_attention_heads"] * vision["head_dim"]
    return held * dtype.size + 3 * 4 * pixels
