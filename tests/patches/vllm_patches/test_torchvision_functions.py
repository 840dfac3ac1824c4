# SPDX-License-Identifier: Apache-2.0
"""Replacements of torchvision's functions, against Pillow and formulas."""

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_metal.patches.vllm_patches import torchvision_functions as ours

MODES = ours.InterpolationMode


def picture(height=37, width=53, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_picture_becomes_a_tensor_of_its_channels(channels):
    image = picture(channels=channels)
    made = ours.pil_to_tensor(image)
    assert made.shape == (channels, 37, 53) and made.dtype == torch.uint8
    np.testing.assert_array_equal(made.permute(1, 2, 0).squeeze(-1), np.asarray(image))
    made += 1  # its memory is its own
    assert made.shape == (channels, 37, 53)


@pytest.mark.parametrize("size", [(16, 20), (74, 106), (37, 20)])
@pytest.mark.parametrize(
    ("mode", "pillow", "levels"),
    [
        (MODES.BICUBIC, Image.Resampling.BICUBIC, 1),
        (MODES.BILINEAR, Image.Resampling.BILINEAR, 1),
        (MODES.NEAREST_EXACT, Image.Resampling.NEAREST, 0),
    ],
)
def test_a_picture_is_resized_as_pillow_does(size, mode, pillow, levels):
    image = picture()
    made = ours.resize(ours.pil_to_tensor(image), size, interpolation=mode)
    assert made.dtype == torch.uint8
    expected = np.asarray(image.resize(size[::-1], pillow)).astype(int)
    assert np.abs(made.permute(1, 2, 0).numpy().astype(int) - expected).max() <= levels


def test_frames_are_resized_one_by_one_and_floats_stay_floats():
    frames = torch.stack([ours.pil_to_tensor(picture(seed=seed)) for seed in range(4)])
    alone = [ours.resize(frame, [8, 9], MODES.BICUBIC) for frame in frames]
    together = ours.resize(frames.view(2, 2, 3, 37, 53), [8, 9], MODES.BICUBIC)
    assert torch.equal(together.view(4, 3, 8, 9), torch.stack(alone))
    assert ours.resize(frames.float(), [8, 9]).dtype == torch.float32


def test_other_interpolations_are_refused_by_name():
    with pytest.raises(ValueError, match="lanczos"):
        ours.resize(torch.zeros(3, 4, 4), [2, 2], MODES.LANCZOS)


def test_pixels_are_shifted_and_scaled_by_channel():
    image = torch.rand(2, 3, 4, 5)
    mean, std = [0.1, 0.2, 0.3], (0.5, 0.6, 0.7)
    expected = np.stack(
        [(image[:, c].numpy() - mean[c]) / np.float32(std[c]) for c in range(3)], axis=1
    )
    kept = image.clone()
    np.testing.assert_allclose(ours.normalize(image, mean, std), expected, rtol=1e-6)
    assert torch.equal(image, kept)
    ours.normalize(image, torch.tensor(mean), torch.tensor(std), inplace=True)
    np.testing.assert_allclose(image, expected, rtol=1e-6)


def test_pictures_are_padded_cut_and_colored():
    image = torch.arange(24.0).view(2, 3, 4)
    padded = ours.pad(image, (1, 2, 3, 4), fill=7)
    assert padded.shape == (2, 3 + 2 + 4, 4 + 1 + 3)
    assert torch.equal(ours.crop(padded, 2, 1, 3, 4), image)
    assert padded.sum() == image.sum() + 7 * (padded.numel() - image.numel())
    grey = torch.rand(5, 1, 2, 2)
    assert torch.equal(ours.grayscale_to_rgb(grey), torch.cat([grey] * 3, dim=1))
