# SPDX-License-Identifier: Apache-2.0
"""Reads the environment variables of the plugin, except VLLM_METAL_CACHE (see metal_kernels)."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, cast, get_args

Device = Literal["metal", "cpu"]
#: How to compute attention and write the KV pool. auto: our Metal kernels on a Mac's GPU if they
#: pass the self-check, else MLX; metal: our kernels, or an error if they fail it; mlx: MLX's own
#: operations; interpret: our kernels, interpreted on the CPU (slow; for developing them).
Kernels = Literal["auto", "metal", "interpret", "mlx"]
#: How to serve GGUF types without an MLX packing, such as Q6_K and IQ4_XS. 8bit: rounded to 8 bits
#: in groups of 64; dense: exact, in the model's dtype.
GGUFInexact = Literal["8bit", "dense"]
NAMES = (
    "VLLM_METAL_DEVICE",
    "VLLM_METAL_KERNELS",
    "VLLM_METAL_CACHE",
    "VLLM_METAL_ALLOW_UNTESTED",
    "VLLM_METAL_SERVING_CONFIG",
    "VLLM_METAL_GGUF_INEXACT",
)
#: Linux device files of CUDA, ROCm, Intel GPUs, and TPUs.
_ACCELERATORS = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dri/renderD*", "dev/accel*", "dev/vfio/[0-9]*")
#: Variables read when the platform is imported.
AT_IMPORT = ("VLLM_METAL_DEVICE", "VLLM_METAL_ALLOW_UNTESTED")


def requested_device() -> Device | None:
    """Returns the MLX device, or None to stay inactive; raises ValueError for unknown values."""
    value = os.environ.get("VLLM_METAL_DEVICE", "auto").lower()
    if value not in ("auto", "metal", "cpu", "off"):
        raise ValueError(f"VLLM_METAL_DEVICE={value!r}: choose metal, cpu or off")
    if value == "off":
        return None
    # "metal" is not checked here: elsewhere than on a Mac, `mlx_device.select` fails with a
    # message.
    if value in ("metal", "cpu"):
        return cast(Device, value)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    # A vLLM without compiled parts could not serve on any other platform.
    return "cpu" if _vllm_is_python_only() else None


def _vllm_is_python_only() -> bool:
    try:
        return version("vllm").endswith("+metal")  # as scripts/vllm_wheel.py builds it
    except PackageNotFoundError:
        return False


def choose_device() -> None:
    """Sets ``VLLM_METAL_DEVICE=cpu`` on Linux if it is unset and nothing else can serve."""
    if "VLLM_METAL_DEVICE" not in os.environ and is_cpu_only_linux():
        os.environ["VLLM_METAL_DEVICE"] = "cpu"


def is_cpu_only_linux() -> bool:
    """Whether this is a Linux machine without an accelerator known to vLLM."""
    return sys.platform == "linux" and not any(
        found for pattern in _ACCELERATORS for found in Path("/").glob(pattern)
    )


def kernels() -> Kernels:
    """Returns ``VLLM_METAL_KERNELS``, "auto" by default; raises ValueError for unknown values."""
    value = os.environ.get("VLLM_METAL_KERNELS", "auto").lower()
    if value not in get_args(Kernels):
        raise ValueError(f"VLLM_METAL_KERNELS={value!r}: choose auto, metal, mlx or interpret")
    return cast(Kernels, value)


def allow_untested() -> bool:
    """Whether to run with an untested vLLM: ``VLLM_METAL_ALLOW_UNTESTED``.

    Raises ValueError for anything but 0 and 1.
    """
    value = os.environ.get("VLLM_METAL_ALLOW_UNTESTED") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"VLLM_METAL_ALLOW_UNTESTED={value!r}: choose 0 or 1")
    return value == "1"


def serving_config() -> Path | None:
    """Returns ``VLLM_METAL_SERVING_CONFIG``: a file of tenants, response cache and time limits."""
    value = os.environ.get("VLLM_METAL_SERVING_CONFIG")
    return Path(value).expanduser() if value else None


def gguf_inexact() -> GGUFInexact:
    """Returns ``VLLM_METAL_GGUF_INEXACT``, "8bit" by default; raises ValueError if unknown."""
    value = os.environ.get("VLLM_METAL_GGUF_INEXACT") or "8bit"
    if value not in get_args(GGUFInexact):
        raise ValueError(f"VLLM_METAL_GGUF_INEXACT={value!r}: choose 8bit or dense")
    return cast(GGUFInexact, value)
