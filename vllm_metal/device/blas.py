# SPDX-License-Identifier: Apache-2.0
"""Loads a fast BLAS for MLX's CPU backend on Linux."""

import ctypes
import importlib.util
import sys
import warnings
from functools import cache
from pathlib import Path

from vllm_metal.device import openmp


@cache
def load() -> str | None:
    """Loads a fast BLAS on Linux for MLX to use; call it before ``mlx.core`` is first imported.

    Only warns if MLX is imported already; a second call does nothing. Returns the name of the
    library that MLX now uses, or None if none was found or needed (macOS).
    """
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        warnings.warn(
            "MLX was imported before vllm_metal and keeps its slow BLAS (some 60 times slower): "
            "import vllm, or call vllm_metal.device.blas.load(), first",
            stacklevel=2,
        )
        return None
    openmp.set_defaults()  # before a library that reads its settings is loaded
    # MLX's Linux wheel contains the reference BLAS (about 3 GFLOP/s). The loader prefers symbols
    # that were loaded globally before it. PyTorch's library has the ``sgemm_`` of MKL or OpenBLAS
    # (measured 60x faster than the reference, 6x faster than Debian's OpenBLAS, with AVX-512);
    # without PyTorch, try the system's OpenBLAS.
    candidates = ["libopenblas.so.0"]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        candidates.insert(0, str(Path(spec.origin).parent / "lib" / "libtorch_cpu.so"))
    for name in candidates:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "sgemm_"):
            return Path(name).name
    return None
