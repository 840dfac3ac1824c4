# SPDX-License-Identifier: Apache-2.0
"""Wraps MLX's device of this process: its name, its limits, its memory in use."""

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
class MemoryUsage:
    """A device's memory at one moment, in bytes."""

    total: int  # upper limit for the device: Metal's recommended working set, or RAM
    available: int  # for this process, beyond what MLX holds already
    active: int  # held by live MLX arrays


def select(device: Device) -> None:
    """Makes `device` MLX's default; raises RuntimeError if Metal is requested but missing."""
    if device == "metal" and not mx.metal.is_available():
        raise RuntimeError(
            "VLLM_METAL_DEVICE=metal: MLX finds no Metal device; "
            "set VLLM_METAL_DEVICE=cpu for MLX's CPU backend"
        )
    mx.set_default_device(mx.Device(mx.gpu if device == "metal" else mx.cpu))


def name(device: Device) -> str:
    """Returns the name of the chip for logs, e.g. ``Apple M3 Max``."""
    if device == "metal":
        return str(mx.device_info(mx.Device(mx.gpu, 0))["device_name"])
    return "cpu"


def total_memory(device: Device) -> int:
    """Returns the bytes that the device may use in total."""
    if device == "metal":
        return int(mx.device_info(mx.Device(mx.gpu, 0))["max_recommended_working_set_size"])
    return psutil.virtual_memory().total


def can_wire(device: Device) -> bool:
    """Whether MLX can keep memory resident: on a GPU, since macOS 15."""
    release = platform.mac_ver()[0].partition(".")[0]
    return device == "metal" and release.isdigit() and int(release) >= 15


def memory(device: Device) -> MemoryUsage:
    total, active = total_memory(device), mx.get_active_memory()
    available = ram.available(active)
    if device == "metal":
        # The working set is only a recommendation: other programs may hold some of that memory.
        available = min(available, total - active)
    return MemoryUsage(total=total, available=available, active=active)


def memory_held() -> int:
    """Returns the bytes that MLX has allocated, including freed buffers kept for reuse."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def give_back() -> None:
    """Frees unreferenced memory, MLX's cached buffers included."""
    # vLLM freezes all objects after start-up, so the collector would skip models and their cycles.
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    mx.clear_cache()
    if sys.platform == "linux":
        _trim()


def _trim() -> None:
    # glibc keeps the smaller arrays that MLX's CPU backend freed.
    with suppress(AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
