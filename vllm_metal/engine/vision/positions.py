# SPDX-License-Identifier: Apache-2.0
"""Positions in a prompt with images: three a row, by time, height and width (M-RoPE).

Text counts all three on together. The rows of an image, or of one frame of a video, share the time
at which it begins and are told apart by height and width; what follows begins behind the largest
of them (Qwen2-VL, arXiv:2409.12191, section 2.1; frames as Qwen3-VL has them, each behind a text
that says its time: `get_rope_index` of transformers' qwen3_vl).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal.engine.vision.images import Image

AXES = 3


@dataclass(frozen=True)
class Shifts:
    """What a row's positions are beyond its place in the request."""

    of_places_np: np.ndarray  # [3, P] int32, up to the end of the last image
    behind: int  # of all places after those; what was generated has it, too

    def at(self, places_np: np.ndarray) -> np.ndarray:
        """[3, n] int32, of [n] places."""
        width = self.of_places_np.shape[1]
        known = self.of_places_np[:, np.minimum(places_np, width - 1)]
        return np.where(places_np < width, known, np.int32(self.behind))


def shifts(images: Sequence[Image], merge_size: int) -> Shifts:
    """The shifts of a prompt.

    Args:
        images: of the prompt, at least one, in order.
        merge_size: patches of a row of an image, on each side.

    Raises:
        ValueError: an image has another number of rows than its grid.
    """
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
    """(first place, height, width) of each frame, in rows."""
    frames, height, width = image.numbers(f"{image.modality}_grid_thw")
    height, width = height // merge_size, width // merge_size
    places = image.places_np
    if len(places) != frames * height * width:
        raise ValueError(
            f"a {image.modality} of {frames} x {height} x {width} has {len(places)} rows in the "
            "prompt"
        )
    for of_frame in places.reshape(frames, -1):
        if of_frame[-1] - of_frame[0] != len(of_frame) - 1:
            raise ValueError(f"the rows of a frame of a {image.modality} do not lie together")
        yield int(of_frame[0]), height, width
