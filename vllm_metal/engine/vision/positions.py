# SPDX-License-Identifier: Apache-2.0
"""Positions in prompts with images: time, height and width per token (M-RoPE).

Text advances all three together. The tokens of an image, or of a video frame, share the time at
which it begins and differ by height and width; what follows begins after the largest of them
(Qwen2-VL, arXiv:2409.12191, section 2.1; each frame follows a text with its time as in Qwen3-VL:
`get_rope_index` of transformers' qwen3_vl).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal.engine.vision.images import Image

AXES = 3


@dataclass(frozen=True)
class Shifts:
    """Differences between a token's positions and its index in the request."""

    of_places_np: np.ndarray  # [3, P] int32, up to the end of the last image
    behind: int  # for all later indices, including generated tokens

    def at(self, places_np: np.ndarray) -> np.ndarray:
        """Looks up the shifts of [n] indices, [3, n] int32."""
        width = self.of_places_np.shape[1]
        known = self.of_places_np[:, np.minimum(places_np, width - 1)]
        return np.where(places_np < width, known, np.int32(self.behind))


def shifts(images: Sequence[Image], merge_size: int) -> Shifts:
    """Computes a prompt's shifts from its images in order, at least one."""
    parts: list[np.ndarray] = []
    shift = end = 0
    for image in images:
        for first, height, width in _frames(image, merge_size):
            text = np.full((AXES, first - end), shift)
            rows, columns = np.indices((height, width)).reshape(2, -1)
            begin = first + shift
            grid = np.stack([np.zeros_like(rows), rows, columns]) + begin
            end = first + height * width
            parts += [text, grid - np.arange(first, end)]
            shift = begin + max(height, width) - end
    return Shifts(np.concatenate(parts, axis=1).astype(np.int32), shift)


def _frames(image: Image, merge_size: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first index, height, width) of each frame, in tokens."""
    frames, height, width = image.numbers(f"{image.modality}_grid_thw")
    height, width = height // merge_size, width // merge_size
    places = image.places_np
    if len(places) != frames * height * width:
        raise ValueError(
            f"a {image.modality} of {frames} x {height} x {width} has {len(places)} rows in the "
            "prompt"
        )
    for frame in places.reshape(frames, -1):
        if frame[-1] - frame[0] != len(frame) - 1:
            raise ValueError(f"the rows of a frame of a {image.modality} do not lie together")
        yield int(frame[0]), height, width
