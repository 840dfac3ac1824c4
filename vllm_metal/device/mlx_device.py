# SPDX-License-Identifier: Apache-2.0
"""Asks MLX for the device of this process: its name, its limits, its memory in use."""

import ctypes
import gc
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx
import psutil

from vllm_metal.device import ram
from vllm_metal.settings.envs import Device


@dataclass(frozen=True)
class MemoryFigures:
    """A device's memory at one moment; every field in bytes."""

    total: int  # what the device may use at all: Metal's recommended working set, or RAM
    available: int  # what this process may take beyond what MLX holds already
    active: int  # held by live MLX arrays


def select(device: Device) -> None:
    """Makes `device` MLX's default.

    Raises:
        RuntimeError: Metal was asked for and this MLX or machine has none.
    """
    if device == "metal" and not mx.metal.is_available():
        raise RuntimeError(
            "VLLM_METAL_DEVICE=metal: MLX finds no Metal device; "
            "set VLLM_METAL_DEVICE=cpu for MLX's CPU backend"
        )
    mx.set_default_device(mx.Device(mx.gpu if device == "metal" else mx.cpu))


def name(device: Device) -> str:
    """Name of the chip for logs, e.g. ``Apple M3 Max``."""
    if device == "metal":
        return str(mx.device_info(mx.Device(mx.gpu, 0))["device_name"])
    return "cpu"


def total_memory(device: Device) -> int:
    """Bytes the device may use at all."""
    if device == "metal":
        return int(mx.device_info(mx.Device(mx.gpu, 0))["max_recommended_working_set_size"])
    return psutil.virtual_memory().total


def can_wire(device: Device) -> bool:
    """Whether MLX can keep memory resident: on a GPU, from macOS 15 on."""
    release = platform.mac_ver()[0].partition(".")[0]
    return device == "metal" and release.isdigit() and int(release) >= 15


def memory(device: Device) -> MemoryFigures:
    """Reads the device's memory figures."""
    total, active = total_memory(device), mx.get_active_memory()
    available = ram.available(active)
    if device == "metal":
        # The working set is a recommendation: other programs may hold some of the same memory.
        available = min(available, total - active)
    return MemoryFigures(total=total, available=available, active=active)


def memory_held() -> int:
    """Bytes that MLX has of the system: live arrays, and buffers it keeps to use again."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def give_back() -> None:
    """Frees memory that no object refers to any more, MLX's spare buffers included."""
    # vLLM freezes all objects after start-up: the collector skips models and their cycles.
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    mx.clear_cache()
    if sys.platform == "linux":
        _trim()


def _trim() -> None:
    """Has the C library give up what MLX's CPU backend freed in it: glibc keeps smaller arrays."""
    with suppress(AttributeError):  # another library, which has no such call
        ctypes.CDLL(None).malloc_trim(0)
