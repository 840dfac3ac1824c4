# SPDX-License-Identifier: Apache-2.0
"""Compiles calls of kernels for AMD GPUs, and reads their costs from the assembly."""

from __future__ import annotations

from pathlib import Path

from .. import toolchain
from .assembly import Figures, read
from .unit import NAME, Call, unit

_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O2", "-w", "-nostdinc", "-nogpulib"),
    *("--target=amdgcn-amd-amdhsa", "-mcpu=gfx1100"),  # 32 lanes, as Apple's
    "-ffp-contract=fast",
    "-fno-integrated-as",  # which would read the shim's lines of assembly
    *("-mllvm", "-inline-threshold=1000000"),
    f"-I{Path(__file__).parent}",
)


def measure(call: Call) -> Figures:
    """Compiles a call's kernel for an AMD GPU and returns the costs that its assembly shows.

    Raises:
        CompileError: the kernel does not compile.
        RuntimeError: the package ziglang is not installed.
    """
    return read(toolchain.assembly(unit(call), _FLAGS), NAME)
