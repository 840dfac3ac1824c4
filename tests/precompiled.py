# SPDX-License-Identifier: Apache-2.0
"""A precompiled header for the kernels that MLX's CPU backend compiles.

MLX passes g++ a file for each new chain of elementwise operations, hundreds in a run of the tests.
Each includes one MLX header, which takes g++ 1.3 of the 1.5 seconds. g++ uses a precompiled
header instead if there is one beside the including file.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
#: MLX's flags (mlx/backend/cpu/jit_compiler.cpp); with others, g++ ignores the header.
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")


def kernels() -> Path:
    """Returns MLX's folder of compiled kernels."""
    return Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "cpu"


def writable(folder: Path) -> bool:
    """Returns whether this process can write to a folder, or create it."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK)


def precompile() -> None:
    """Compiles the header with the current g++; it persists, like MLX's kernels."""
    package, compiler = find_spec("mlx"), shutil.which("g++")
    if sys.platform != "linux" or compiler is None or package is None:
        return
    for root in package.submodule_search_locations or ():
        header = Path(root) / "include" / HEADER
        if not header.is_file():
            continue
        found = kernels() / f"{HEADER}.gch"
        found.parent.mkdir(parents=True, exist_ok=True)
        made = found.with_suffix(f".{os.getpid()}")
        source = [f"-I{root}/include", "-x", "c++-header", str(header), "-o", str(made)]
        ran = subprocess.run([compiler, *OPTIONS, *source], stderr=subprocess.DEVNULL)
        if ran.returncode == 0:
            made.replace(found)  # other runs may be using the previous one
