# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM and transformers read images and video frames without torchvision.

vLLM's multimodal modules import transformers' torchvision-based processors. torchvision has no CPU
build in Linux's package index, and needs the exact torch that vLLM has. transformers has most
processors in a Pillow version, and chooses it if torchvision is missing; the others get torch
functions instead. If torchvision is installed, nothing changes.
"""

# Remove when vLLM imports processors by the names that transformers chooses, transformers offers
# all that works without torchvision, and vLLM answers 400. Read against vLLM 0.33.

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vllm_metal.patches.vllm_patches import torchvision_functions
from vllm_metal.patches.vllm_patches.replacing import replace

#: Classes that transformers offers only with torchvision, though they work without: module, class.
_OFFERED_WITH_TORCHVISION = (
    ("video_processing_utils", "VideoProcessorMixin"),
    ("models.qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
    ("models.pixtral.processing_pixtral", "PixtralProcessor"),
    ("models.gemma4.video_processing_gemma4", "Gemma4VideoProcessor"),
    ("models.gemma4.processing_gemma4", "Gemma4Processor"),
    ("models.inkling.image_processing_inkling", "InklingImageProcessor"),
    ("models.lfm2_vl.image_processing_lfm2_vl", "Lfm2VlImageProcessor"),
)
_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONAL = "torchvision.transforms.v2.functional"


@contextmanager
def readable() -> Iterator[None]:
    """Lets vLLM's model modules be imported without torchvision."""
    # Nothing stays under torchvision's name: other packages check whether it is installed.
    if _installed():
        yield
        return
    with _named_torchvision():
        _give_functions()
        yield


def refuse_bombs() -> None:
    """Makes an image with more pixels than Pillow allows fail its request, as invalid ones do."""
    # vLLM answers 400 above its own limit, but checks that after Pillow's, whose error it treats
    # as one of the server.
    from vllm.multimodal.media import image

    replace(image, "open_image", _without_bombs)


def _without_bombs(open_image: Callable[[Any], Any], fp: Any) -> Any:
    from PIL.Image import DecompressionBombError

    try:
        return open_image(fp)
    except DecompressionBombError as error:
        raise ValueError(f"Failed to load image: {error}") from error


@functools.cache
def _installed() -> bool:
    return find_spec("torchvision") is not None


@contextmanager
def _named_torchvision() -> Iterator[None]:
    # `from torchvision.transforms.v2 import functional` looks each part up in its parent.
    modules = {name: ModuleType(name) for name in _NAMES}
    modules[_FUNCTIONAL] = torchvision_functions
    for name, module in modules.items():
        if parent := name.rpartition(".")[0]:
            setattr(modules[parent], name.rpartition(".")[2], module)
    modules["torchvision.transforms"].__dict__["InterpolationMode"] = (
        torchvision_functions.InterpolationMode
    )
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


@contextmanager
def _pretend_torchvision() -> Iterator[None]:
    # Makes a transformers module use our functions if it checks for torchvision first.
    from transformers import utils

    original = utils.is_torchvision_v2_available
    utils.is_torchvision_v2_available = lambda: True
    try:
        yield
    finally:
        utils.is_torchvision_v2_available = original


@functools.cache
def _give_functions() -> None:
    """Gives transformers' base classes the functions, and offers the classes it held back."""
    import transformers
    from transformers import image_processing_backends as backends
    from transformers import processing_utils
    from transformers import video_processing_utils as videos
    from transformers.image_utils import PILImageResampling

    modes = {mode.name: mode for mode in torchvision_functions.InterpolationMode}
    modes["NEAREST"] = modes["NEAREST_EXACT"]  # Pillow's; torchvision's NEAREST is OpenCV's
    by_resampling = {each: modes[each.name] for each in PILImageResampling if each.name in modes}
    backends.pil_torch_interpolation_mapping = by_resampling
    backends.torch_pil_interpolation_mapping = {v: k for k, v in by_resampling.items()}
    for module in (backends, videos):
        module.__dict__["tvF"] = torchvision_functions
    for path, name in _OFFERED_WITH_TORCHVISION:
        with _pretend_torchvision():
            module = import_module(f"transformers.{path}")
        package = import_module(module.__package__ or "transformers")
        for owner in (transformers, processing_utils.transformers_module, package):
            setattr(owner, name, getattr(module, name))
