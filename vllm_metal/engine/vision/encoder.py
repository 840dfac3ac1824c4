# SPDX-License-Identifier: Apache-2.0
"""Outputs of a tower by hash, from the step that first needs one until the scheduler frees it."""

from __future__ import annotations

import time
from collections.abc import Iterable

import mlx.core as mx

from vllm_metal.engine.vision.images import Image
from vllm_metal.engine.vision.tower import Tower
from vllm_metal.metrics.figures import measure


class Encoder:
    """A tower, and what it made of images that requests still need, or may need again.

    vLLM's scheduler decides what is kept, within its encoder cache, and names by hash what is to
    go. It outlives a runner and its pool, as the scheduler's own count does.
    """

    def __init__(self, tower: Tower, dtype: mx.Dtype) -> None:
        """
        Args:
            tower: with its weights.
            dtype: of the embeddings.
        """
        self.tower, self._dtype = tower, dtype
        self._outputs: dict[str, mx.array] = {}
        #: How many images were computed, ever.
        self.num_encoded = 0

    def output(self, image: Image) -> mx.array:
        """[n, 1 + levels, H]: an image's embeddings, then what DeepStack adds in each layer.

        The device has computed it: an image that cannot be computed fails here, by itself, and the
        tower's memory is not needed beside that of the step.

        Raises:
            Exception: the tower cannot compute the image.
        """
        found = self._outputs.get(image.key)
        if found is None:
            started = time.perf_counter()
            found = self.tower.encode(image.modality, image.data).astype(self._dtype)
            if len(found) != len(image.places_np):
                raise ValueError(
                    f"the tower made {len(found)} rows of a {image.modality} that has "
                    f"{len(image.places_np)} in the prompt"
                )
            mx.eval(found)
            measure("image_seconds", time.perf_counter() - started)
            measure("images_encoded")
            self.num_encoded += 1
            self._outputs[image.key] = found
        return found

    def free(self, keys: Iterable[str]) -> None:
        """Forgets outputs that the scheduler does not count any more."""
        for key in keys:
            self._outputs.pop(key, None)

    def reset(self) -> None:
        """Forgets all outputs."""
        self._outputs.clear()

    def row_bytes(self, rows: mx.array) -> int:
        """Bytes that are kept of one of [n, 1 + levels, H] rows."""
        return rows[0].size * self._dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(output.nbytes for output in self._outputs.values())
