# SPDX-License-Identifier: Apache-2.0
"""Reads the plugin's environment variables, all but VLLM_METAL_CACHE, which metal_kernels reads."""

import os
import platform
import sys
from pathlib import Path
from typing import Literal, cast, get_args

Device = Literal["metal", "cpu"]
Kernels = Literal["auto", "metal", "interpret", "mlx"]
NAMES = (
    "VLLM_METAL_DEVICE",
    "VLLM_METAL_KERNELS",
    "VLLM_METAL_CACHE",
    "VLLM_METAL_ALLOW_UNTESTED",
    "VLLM_METAL_SERVING_CONFIG",
)
#: Those that are read when the platform is imported.
AT_IMPORT = ("VLLM_METAL_DEVICE", "VLLM_METAL_ALLOW_UNTESTED")


def requested_device() -> Device | None:
    """The MLX device to serve on, or None where the plugin stays out of the way.

    ``VLLM_METAL_DEVICE``: ``metal`` (the default on Apple silicon; elsewhere loading fails for want
    of a Metal device), ``cpu`` (MLX's CPU backend, on any machine) or ``off``.

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("VLLM_METAL_DEVICE", "auto").lower()
    if value not in ("auto", "metal", "cpu", "off"):
        raise ValueError(f"VLLM_METAL_DEVICE={value!r}: choose metal, cpu or off")
    if value == "off":
        return None
    if value in ("metal", "cpu"):
        return cast(Device, value)
    return "metal" if sys.platform == "darwin" and platform.machine() == "arm64" else None


def kernels() -> Kernels:
    """What computes attention and writes the KV pool: ``VLLM_METAL_KERNELS``.

    ``auto``: our Metal kernels on a Mac's GPU where they pass their self-check, else MLX;
    ``metal``: the kernels, or an error where they do not pass; ``mlx``: MLX's own operations;
    ``interpret``: the kernels, interpreted on the CPU (slow; for developing them).

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("VLLM_METAL_KERNELS", "auto").lower()
    if value not in get_args(Kernels):
        raise ValueError(f"VLLM_METAL_KERNELS={value!r}: choose auto, metal, mlx or interpret")
    return cast(Kernels, value)


def allow_untested() -> bool:
    """Whether to go on with a vLLM this plugin is not tested with: ``VLLM_METAL_ALLOW_UNTESTED``.

    Raises:
        ValueError: the variable holds anything but 0 and 1.
    """
    value = os.environ.get("VLLM_METAL_ALLOW_UNTESTED") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"VLLM_METAL_ALLOW_UNTESTED={value!r}: choose 0 or 1")
    return value == "1"


def serving_config() -> Path | None:
    """The file of tenants, kept answers and time limits: ``VLLM_METAL_SERVING_CONFIG``.

    None where it is not set, or empty.
    """
    value = os.environ.get("VLLM_METAL_SERVING_CONFIG")
    return Path(value).expanduser() if value else None
