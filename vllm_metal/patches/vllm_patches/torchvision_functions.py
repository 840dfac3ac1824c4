# SPDX-License-Identifier: Apache-2.0
"""The few functions of torchvision that transformers' image processors call, made of torch's own.

Names, arguments and results are those of `torchvision.transforms.v2.functional`, for tensors
[..., C, H, W] alone.
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
    """How pixels are made of others, by torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_WITH_ANTIALIAS = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC)


def pil_to_tensor(image: Image) -> torch.Tensor:
    """A PIL image as a tensor [C, H, W] of its own dtype, as a rule uint8."""
    pixels = np.array(image, copy=True)
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """An image of three channels: its single one three times, or itself."""
    if image.shape[-3] != 1:
        return image
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:])


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """A float or uint8 image of another size (height, width), of the same dtype.

    torch rounds and limits uint8 between width and height, as Pillow does.

    Raises:
        ValueError: torch has no such interpolation.
    """
    if interpolation not in (*_WITH_ANTIALIAS, *list(InterpolationMode)[:2]):
        raise ValueError(f"torch does not interpolate by {interpolation.value!r}")
    smooth = {}
    if interpolation in _WITH_ANTIALIAS:
        smooth = {"align_corners": False, "antialias": antialias}
    flat = image.reshape(-1, *image.shape[-3:])
    made = functional.interpolate(flat, size=tuple(size), mode=interpolation.value, **smooth)
    return made.reshape(*image.shape[:-2], *size)


def normalize(
    image: torch.Tensor,
    mean: float | Iterable[float] | torch.Tensor,
    std: float | Iterable[float] | torch.Tensor,
    inplace: bool = False,
) -> torch.Tensor:
    """An image less `mean`, over `std`, both by channel."""
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
    """An image with columns and rows around it: left, top, right, bottom."""
    left, top, right, bottom = padding
    return functional.pad(image, (left, right, top, bottom), padding_mode, fill or 0)


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """A part of an image, which lies within it."""
    return image[..., top : top + height, left : left + width]
