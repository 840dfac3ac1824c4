# SPDX-License-Identifier: Apache-2.0
"""Reads the plugin's environment variables, all but VLLM_METAL_CACHE, which metal_kernels reads."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, cast, get_args

Device = Literal["metal", "cpu"]
Kernels = Literal["auto", "metal", "interpret", "mlx"]
GGUFInexact = Literal["8bit", "dense"]
NAMES = (
    "VLLM_METAL_DEVICE",
    "VLLM_METAL_KERNELS",
    "VLLM_METAL_CACHE",
    "VLLM_METAL_ALLOW_UNTESTED",
    "VLLM_METAL_SERVING_CONFIG",
    "VLLM_METAL_GGUF_INEXACT",
)
#: Devices of Linux: CUDA's, ROCm's, Intel's, and TPUs.
_ACCELERATORS = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dri/renderD*", "dev/accel*", "dev/vfio/[0-9]*")
#: Those that are read when the platform is imported.
AT_IMPORT = ("VLLM_METAL_DEVICE", "VLLM_METAL_ALLOW_UNTESTED")


def requested_device() -> Device | None:
    """The MLX device to serve on, or None where the plugin stays out of the way.

    ``VLLM_METAL_DEVICE``: ``metal`` (the default on Apple silicon; elsewhere loading fails for want
    of a Metal device), ``cpu`` (MLX's CPU backend, on any machine; the default on others where vLLM
    has no compiled parts, so that nothing else could serve) or ``off``.

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
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    return "cpu" if _vllm_is_python_only() else None


def _vllm_is_python_only() -> bool:
    """Whether vLLM is the wheel that scripts/vllm_wheel.py makes."""
    try:
        return version("vllm").endswith("+metal")
    except PackageNotFoundError:
        return False


def choose_device() -> None:
    """Sets ``VLLM_METAL_DEVICE=cpu`` where it is not set and nothing else can serve: on Linux."""
    if "VLLM_METAL_DEVICE" not in os.environ and is_left_to_cpus():
        os.environ["VLLM_METAL_DEVICE"] = "cpu"


def is_left_to_cpus() -> bool:
    """Whether this is a Linux machine without an accelerator that vLLM knows."""
    return sys.platform == "linux" and not any(
        found for pattern in _ACCELERATORS for found in Path("/").glob(pattern)
    )


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


def gguf_inexact() -> GGUFInexact:
    """How matrices of GGUF types are served that MLX has no packing for, such as Q6_K and IQ4_XS:
    ``VLLM_METAL_GGUF_INEXACT``.

    ``8bit``: rounded to 8 bits in groups of 64; ``dense``: not rounded, in the model's dtype.

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("VLLM_METAL_GGUF_INEXACT") or "8bit"
    if value not in get_args(GGUFInexact):
        raise ValueError(f"VLLM_METAL_GGUF_INEXACT={value!r}: choose 8bit or dense")
    return cast(GGUFInexact, value)
