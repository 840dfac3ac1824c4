# SPDX-License-Identifier: Apache-2.0
"""A precompiled header for the kernels that MLX's CPU backend compiles.

MLX hands g++ a file for each new chain of elementwise operations, hundreds in a run of the tests.
Each includes one header of MLX, which takes g++ 1.3 of the 1.5 seconds. g++ takes a precompiled
header instead where one lies beside the file that includes it.
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
#: As MLX calls g++ (mlx/backend/cpu/jit_compiler.cpp): others make g++ pass the header over.
OPTIONS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")


def kernels() -> Path:
    """Where MLX writes kernels, and compiles them unless they are there."""
    return Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "cpu"


def writable(folder: Path) -> bool:
    """Whether this process may write to a folder, or make it."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK)


def precompile() -> None:
    """Compiles the header, for the g++ of today; it stays there, as MLX's kernels do."""
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
            made.replace(found)  # other runs may be using the one before
