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
from typing import TYPE_CHECKING

import numpy as np

from vllm_metal.engine.vision.images import Image

if TYPE_CHECKING:
    from vllm_metal.engine.batch.rows import Rows

AXES = 3


@dataclass(frozen=True)
class Shifts:
    """Differences between a token's positions and its index in the request."""

    shifts_np: np.ndarray  # [3, P] int32, up to the end of the last image
    shift_after: int  # for all later indices, including generated tokens

    def at(self, indices_np: np.ndarray) -> np.ndarray:
        """Looks up the shifts of tokens by their [n] indices; [3, n] int32."""
        width = self.shifts_np.shape[1]
        known = self.shifts_np[:, np.minimum(indices_np, width - 1)]
        return np.where(indices_np < width, known, np.int32(self.shift_after))


class ShiftTable:
    """The shifts of requests that have images, by req_idx."""

    def __init__(self) -> None:
        self._of: dict[int, Shifts] = {}
        # By req_idx, as many as have been needed.
        self._ends_np = np.zeros(0, np.int32)  # of the last image
        self._shift_after_np = np.zeros(0, np.int32)

    def enter(self, req_idx: int, shifts: Shifts) -> None:
        self._grow(req_idx + 1)
        self._of[req_idx] = shifts
        self._ends_np[req_idx] = shifts.shifts_np.shape[1]
        self._shift_after_np[req_idx] = shifts.shift_after

    def _grow(self, size: int) -> None:
        missing = size - len(self._ends_np)
        if missing > 0:
            self._ends_np = np.pad(self._ends_np, (0, missing))
            self._shift_after_np = np.pad(self._shift_after_np, (0, missing))

    def leave(self, req_idx: int) -> None:
        """Clears a req_idx; no-op if its request has no images."""
        if self._of.pop(req_idx, None) is not None:
            self._ends_np[req_idx] = self._shift_after_np[req_idx] = 0

    def of_rows(self, rows: Rows) -> np.ndarray | None:
        """The shifts of a batch's tokens.

        Where positions are only upper bounds, all images are before them and shifts are constant.

        Returns:
            [1, T] int32 if each token's three shifts are equal, else [3, T]; None if all are 0.
        """
        if not self._of:
            return None
        req_indices_np, starts_np = rows.req_indices_np, rows.query_start_loc_np
        self._grow(int(req_indices_np.max()) + 1)
        found = np.repeat(self._shift_after_np[req_indices_np], np.diff(starts_np))[None]
        within = rows.positions_np[starts_np[:-1]] < self._ends_np[req_indices_np]
        if within.any():
            found = np.repeat(found, AXES, axis=0)
            for index in np.flatnonzero(within).tolist():
                span = slice(starts_np[index], starts_np[index + 1])
                of = self._of[int(req_indices_np[index])]
                found[:, span] = of.at(rows.positions_np[span])
            if (found == found[0]).all():
                found = found[:1]
        return found if found.any() else None


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
    indices = image.indices_np
    if len(indices) != frames * height * width:
        raise ValueError(
            f"a {image.modality} of {frames} x {height} x {width} has {len(indices)} rows in the "
            "prompt"
        )
    for frame in indices.reshape(frames, -1):
        if frame[-1] - frame[0] != len(frame) - 1:
            raise ValueError(f"the rows of a frame of a {image.modality} do not lie together")
        yield int(frame[0]), height, width
