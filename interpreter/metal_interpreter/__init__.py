# SPDX-License-Identifier: Apache-2.0
"""Runs Metal kernels on a CPU, for tests on machines without a GPU.

import metal_interpreter
from metal_kernels import kernel
with kernel.using(metal_interpreter.metal_kernel):  # instead of mx.fast.metal_kernel
    ...

Kernels made in a `with` block like this one run on the CPU. `Checker` also checks memory accesses.
"""

from .checker import Checker, Dispatch, Traffic
from .coverage import Coverage
from .kernel_call import metal_kernel
from .launch import KernelViolation
from .lint import lint
from .strict import Strict
from .toolchain import CompileError

__all__ = [
    "Checker",
    "CompileError",
    "Coverage",
    "Dispatch",
    "KernelViolation",
    "Strict",
    "Traffic",
    "lint",
    "metal_kernel",
]
