# SPDX-License-Identifier: Apache-2.0
"""Imports model modules that mlx-lm lacks (towers and encoders) from the optional mlx-vlm."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from vllm_metal.settings.extras import install_advice

#: Variables that importing mlx-vlm sets for the whole process.
_VARIABLES = ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_VERBOSITY")

#: Modules of transformers with a processor that importing a family changes, and its name prefix.
_PROCESSORS = {"lfm2_vl": ("transformers.models.lfm2_vl.processing_lfm2_vl", "Lfm2VlProcessor")}


def family(name: str, wanted_by: str) -> ModuleType:
    """Imports `mlx_vlm.models.NAME` and undoes the import's other changes.

    Args:
        name: usually the `model_type` of a configuration.
        wanted_by: feature that needs the module, as the subject of the error's sentence.

    Raises:
        ImportError: mlx-vlm is not installed; the message has the install command.
        ModuleNotFoundError: this release of mlx-vlm has no such family.
    """
    with _processor_unchanged(name):
        return _imported(f"models.{name}", wanted_by)


def drafter(name: str, wanted_by: str) -> ModuleType:
    """Imports `mlx_vlm.speculative.drafters.NAME`; arguments and errors as in `family`."""
    return _imported(f"speculative.drafters.{name}", wanted_by)


def _imported(name: str, wanted_by: str) -> ModuleType:
    if find_spec("mlx_vlm") is None:
        raise ImportError(f"{wanted_by} needs mlx-vlm; run: {install_advice('vlm')}")
    with _process_unchanged(), _sound_left_out():
        return import_module(f"mlx_vlm.{name}")


@contextmanager
def _processor_unchanged(name: str) -> Iterator[None]:
    # mlx-vlm changes a family's own processor, with which vLLM reads images.
    if name not in _PROCESSORS:
        yield
        return
    module, processor = _PROCESSORS[name]
    cls = getattr(import_module(module), processor)
    defaults = getattr(import_module(module), f"{processor}Kwargs")._defaults
    methods, values = dict(cls.__dict__), deepcopy(defaults)
    try:
        yield
    finally:
        for key in ("__init__", "__call__", "from_pretrained"):
            if key in methods:
                setattr(cls, key, methods[key])
            elif key in cls.__dict__:
                delattr(cls, key)
        defaults.clear()
        defaults.update(values)


@contextmanager
def _sound_left_out() -> Iterator[None]:
    # Some families import functions of mlx-audio, which the install command leaves out, to read
    # sound. Text models and towers never call them.
    if find_spec("mlx_audio") is not None:
        yield
        return
    package, functions = ModuleType("mlx_audio"), ModuleType("mlx_audio.dsp")
    for name in ("hanning", "mel_filters", "stft"):
        setattr(functions, name, None)
    sys.modules |= {module.__name__: module for module in (package, functions)}
    try:
        yield
    finally:
        for module in (package, functions):
            del sys.modules[module.__name__]


@contextmanager
def _process_unchanged() -> Iterator[None]:
    # On import, mlx-vlm changes processors of transformers and their log level.
    from transformers import AutoProcessor

    variables = {name: os.environ.get(name) for name in _VARIABLES}
    # A stub class lacks it, and families replace it: see `vllm_patches.partial_imports`.
    from_pretrained = AutoProcessor.__dict__.get("from_pretrained")
    if from_pretrained is None:
        setattr(AutoProcessor, "from_pretrained", None)  # noqa: B010 - mypy: no method
    try:
        yield
    finally:
        if from_pretrained is not None:
            setattr(AutoProcessor, "from_pretrained", from_pretrained)  # noqa: B010 - mypy: no method
        else:
            del AutoProcessor.from_pretrained
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
