# SPDX-License-Identifier: Apache-2.0
"""Implements the torchvision functions that transformers' image processors call, with torch.

Names, arguments and results are those of `torchvision.transforms.v2.functional`, only for tensors
[..., C, H, W].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from PIL.Image import Image


class InterpolationMode(Enum):
    """torchvision's interpolation modes."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_WITH_ANTIALIAS = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


def pil_to_tensor(image: Image) -> torch.Tensor:
    """Converts a PIL image to a tensor [C, H, W] of its own dtype, usually uint8."""
    pixels = np.array(image, copy=True)
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """Repeats a single channel three times; returns an image of three channels unchanged."""
    if image.shape[-3] != 1:
        return image
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:])


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """Resizes a float or uint8 image to (height, width), keeping its dtype.

    Raises ValueError: torch does not have this interpolation.
    """
    if interpolation not in (*_WITH_ANTIALIAS, *list(InterpolationMode)[:2]):
        raise ValueError(f"torch does not interpolate by {interpolation.value!r}")
    smooth = {}
    if interpolation in _WITH_ANTIALIAS:
        smooth = {"align_corners": False, "antialias": antialias}
    # torch rounds and clips uint8 between the two axes, as Pillow does.
    flat = image.reshape(-1, *image.shape[-3:])
    made = functional.interpolate(flat, size=tuple(size), mode=interpolation.value, **smooth)
    return made.reshape(*image.shape[:-2], *size)


def normalize(
    image: torch.Tensor,
    mean: float | Iterable[float] | torch.Tensor,
    std: float | Iterable[float] | torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
    """Subtracts `mean` and divides by `std`, both per channel."""
    shift, scale = (_by_channel(values, image) for values in (mean, std))
    result = image if inplace else image.clone()
    return result.sub_(shift).div_(scale)


def _by_channel(
    values: float | Iterable[float] | torch.Tensor, image: torch.Tensor
) -> torch.Tensor:
    return torch.as_tensor(values, dtype=image.dtype).reshape(-1, 1, 1)


def pad(
    image: torch.Tensor, padding: Sequence[int], fill: float = 0, padding_mode: str = "constant"
) -> torch.Tensor:
    """Pads an image by columns and rows: left, top, right, bottom."""
    left, top, right, bottom = padding
    return functional.pad(image, (left, right, top, bottom), padding_mode, fill or 0)


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """Returns a region within an image."""
    return image[..., top : top + height, left : left + width]
