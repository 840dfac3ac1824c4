# SPDX-License-Identifier: Apache-2.0
"""A fast BLAS for MLX's CPU backend, and a warning if it is loaded too late."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_the_loaded_library_answers_for_mlx():
    # dladdr of the symbol as the dynamic linker finds it first: what MLX will be bound to.
    code = """
import ctypes
from vllm_metal.device import blas
name = blas.load()
import mlx.core as mx
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("a", ctypes.c_void_p), ("b", ctypes.c_char_p),
                ("c", ctypes.c_void_p)]
process, info = ctypes.CDLL(None), Info()
process.dladdr(ctypes.cast(process.sgemm_, ctypes.c_void_p), ctypes.byref(info))
assert name and info.file.decode().endswith(name), (name, info.file)
a = mx.arange(12.0).reshape(3, 4)
assert (a @ a.T).tolist()[0] == [14.0, 38.0, 62.0]
"""
    python(code)


def test_loading_after_mlx_warns_and_changes_nothing():
    code = "import mlx.core; from vllm_metal.device import blas; print(blas.load())"
    done = python(code)
    assert done.stdout.strip() == "None"
    assert "import vllm, or call vllm_metal.device.blas.load(), first" in done.stderr
