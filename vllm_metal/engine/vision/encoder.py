# SPDX-License-Identifier: Apache-2.0
"""Keeps a tower's outputs by hash from first use until the scheduler frees them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import mlx.core as mx

from vllm_metal.engine.vision.images import Image
from vllm_metal.engine.vision.tower import Tower
from vllm_metal.metrics.step_metrics import measure


class Encoder:
    """A vision tower, and a cache of its outputs by image hash.

    vLLM's scheduler decides what stays in its encoder cache and frees by hash. The encoder
    outlives the runner and its pool, as the scheduler's accounting does.
    """

    def __init__(self, tower: Tower, dtype: mx.Dtype) -> None:
        self.tower, self._dtype = tower, dtype
        self._outputs: dict[str, mx.array] = {}
        #: Number of images computed so far.
        self.num_encoded = 0

    def output(self, image: Image) -> mx.array:
        """An image's output [n, 1 + levels, H]: embeddings, then what DeepStack adds per layer."""
        found = self._outputs.get(image.key)
        if found is None:
            started = time.perf_counter()
            found = self.tower.encode(image.modality, image.data).astype(self._dtype)
            if len(found) != len(image.indices_np):
                raise ValueError(
                    f"the tower made {len(found)} rows of a {image.modality} that has "
                    f"{len(image.indices_np)} in the prompt"
                )
            # Evaluated here so that a bad image fails alone, and so that the tower's memory is
            # free again before the step needs its own.
            mx.eval(found)
            measure("image_seconds", time.perf_counter() - started)
            measure("images_encoded")
            self.num_encoded += 1
            self._outputs[image.key] = found
        return found

    def known(self, image: Image) -> mx.array | None:
        """The image's cached output; None if it is not cached."""
        return self._outputs.get(image.key)

    def free(self, keys: Iterable[str]) -> None:
        """Drops outputs that the scheduler has freed."""
        for key in keys:
            self._outputs.pop(key, None)

    def reset(self) -> None:
        self._outputs.clear()

    def row_bytes(self, rows: mx.array) -> int:
        """Bytes kept per token of an output [n, 1 + levels, H]."""
        return rows[0].size * self._dtype.size

    @property
    def nbytes(self) -> int:
        """Bytes of all kept outputs."""
        return sum(output.nbytes for output in self._outputs.values())
