# SPDX-License-Identifier: Apache-2.0
"""An image of a request: its tokens in the prompt and the tower's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


@dataclass(frozen=True, eq=False)
class Image:
    """An image or a video as vLLM's processor placed it in a prompt."""

    feature: MultiModalFeatureSpec

    @property
    def key(self) -> str:
        """Content hash by which the scheduler counts and frees encoder outputs."""
        return self.feature.identifier

    @property
    def modality(self) -> str:
        """Either "image" or "video"."""
        return self.feature.modality

    @cached_property
    def indices_np(self) -> np.ndarray:
        """[n] int32, indices in the prompt of the tokens that the tower embeds, in its order."""
        position = self.feature.mm_position
        indices = np.arange(position.offset, position.offset + position.length, dtype=np.int32)
        return indices if position.is_embed is None else indices[position.is_embed.numpy()]

    @property
    def end(self) -> int:
        """Index in the prompt of the first token after the image."""
        return self.feature.mm_position.offset + self.feature.mm_position.length

    @cached_property
    def runs_np(self) -> np.ndarray:
        """Contiguous runs of `indices_np`, [m, 2] int32: first index and one past the last."""
        indices = self.indices_np
        gaps = np.flatnonzero(np.diff(indices) != 1)
        firsts, lasts = indices[np.append(0, gaps + 1)], indices[np.append(gaps, len(indices) - 1)]
        return np.stack([firsts, lasts + 1], axis=1)

    @property
    def data(self) -> Mapping[str, mx.array]:
        """The tower's inputs by name. Raises ValueError if vLLM did not send them."""
        item = self.feature.data
        if item is None or not item:
            raise ValueError(f"the scheduler sent no data of a {self.modality}")
        # A video's frame times are texts in the prompt, not inputs of the tower.
        data = item.get_data().items()
        return {name: _on_device(each) for name, each in data if isinstance(each, torch.Tensor)}

    def numbers(self, name: str) -> list[int]:
        """Returns one of the tower's inputs as integers. Raises ValueError if it is missing."""
        item = self.feature.data
        if item is None or name not in item:
            raise ValueError(f"the scheduler sent no {name} of a {self.modality}")
        tensor = item[name].data
        assert isinstance(tensor, torch.Tensor)
        return [int(number) for number in tensor.flatten().tolist()]


def images_of(features: Sequence[MultiModalFeatureSpec]) -> list[Image]:
    """Returns a request's images in prompt order."""
    return [Image(each) for each in sorted(features, key=lambda f: f.mm_position.offset)]


def _on_device(tensor: torch.Tensor) -> mx.array:
    if tensor.dtype == torch.bfloat16:  # numpy has none; float32 holds it exactly
        tensor = tensor.float()
    return mx.array(tensor.numpy())
