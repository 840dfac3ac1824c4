# SPDX-License-Identifier: Apache-2.0
"""Identifies what measurements depend on: chip, system, sources. Does not import MLX."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import metal_kernels
from vllm_metal.device import sysctl

_KERNELS_FOLDER = Path(metal_kernels.__file__).parent


def software() -> dict[str, str]:
    """Returns the system, the releases of MLX and mlx-lm, and a digest of the kernels' sources."""
    return {
        "system": platform.platform(),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "sources": _sources(),
    }


def chip() -> str | None:
    """Returns the chip as MLX names a Mac's GPU, such as ``Apple M3 Max``; None elsewhere."""
    return sysctl.read_text("machdep.cpu.brand_string") if sys.platform == "darwin" else None


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(_KERNELS_FOLDER.rglob("*")):
        if path.suffix in (".metal", ".py"):
            name = path.relative_to(_KERNELS_FOLDER)
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
