# SPDX-License-Identifier: Apache-2.0
"""g++ uses the precompiled header for kernels of MLX's CPU backend."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from precompiled import HEADER, OPTIONS, kernels

if sys.platform != "linux":
    pytest.skip("MLX calls clang there", allow_module_level=True)


def test_gxx_takes_the_precompiled_header():
    folder = kernels()
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"test-{os.getpid()}.cpp"
    source.write_text(f'#include "{HEADER}"\n')
    include = Path(mx.__file__).parent / "include"
    try:
        ran = subprocess.run(
            ["g++", *OPTIONS, f"-I{include}", "-H", str(source), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        source.unlink()
    taken = [line for line in ran.stderr.splitlines() if line.startswith("! ")]
    assert taken == [f"! {folder / HEADER}.gch"], ran.stderr
