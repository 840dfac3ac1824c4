# SPDX-License-Identifier: Apache-2.0
"""Imitates torch's macOS wheel, whose MPS accelerator crashes, and MLX's BLAS."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import darwin_double
from darwin_double import modules, system


def install() -> None:
    modules.after_import("torch", _have_mps)
    modules.before_import("mlx.core", _load_blas)


def _have_mps(torch: ModuleType) -> None:
    """Makes torch's compiled part report MPS."""
    generator = torch.Generator()
    answers = {
        "_has_mps": True,
        "_mps_is_available": lambda: True,
        "_mps_is_on_macos_or_newer": lambda major, minor: True,
        "_mps_is_in_bad_fork": lambda: False,
        "_mps_get_default_generator": lambda: generator,
        "_mps_deviceSynchronize": lambda: None,
        "_mps_currentAllocatedMemory": lambda: 0,
        "_mps_driverAllocatedMemory": lambda: 0,
        "_accelerator_getAccelerator": lambda: torch.device("mps"),
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": lambda index: None,
        "_accelerator_synchronizeDevice": lambda index: None,
        "_accelerator_isAllocatorInitialized": lambda: True,
    }
    for name in ("_accelerator_emptyCache", "_accelerator_emptyHostCache", "_mps_emptyCache"):
        answers[name] = partial(darwin_double.crash, f"torch._C.{name}() on a null host allocator")
    for name, answer in answers.items():
        setattr(torch._C, name, answer)
    torch.backends.mps.is_available.cache_clear()


def _load_blas() -> None:
    """Loads a fast BLAS, like MLX's Accelerate on a Mac: the one that the plugin finds."""
    from vllm_metal.device import blas

    with system.as_linux():
        blas.load.__wrapped__()
