# SPDX-License-Identifier: Apache-2.0
"""Loads kernels from .metal files and runs them through a compiler.

A .metal file holds functions, then a line `// ---- kernel body`, then the body of the kernel, whose
signature `mx.fast.metal_kernel` generates from the names of its buffers. The compiler is that
function on a Mac, or another one with its signature, such as the interpreter's.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_kernels.kernel_text import Part, compact, used

#: Separates the functions from the body of a .metal file.
BODY_MARKER = "// ---- kernel body\n"
#: MLX passes smaller inputs in the constant address space. That changes the signature, so another
#: kernel must be compiled, and kernels cannot write through such an input.
MIN_ELEMENTS = 8

_SHARED = Path(__file__).parent / "shared"

Compiler = Callable[..., Any]  # mx.fast.metal_kernel, or a function with its signature


@dataclass(frozen=True)
class Kernel:
    """A kernel, compiled for each set of template arguments on its first call."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str  # functions
    body: str

    def __call__(self, **call: Any) -> list[mx.array]:
        """Takes the keyword arguments of a kernel made by `mx.fast.metal_kernel`."""
        return _compiled(_compiler, self)(**call)


def load(
    path: Path, input_names: Sequence[str], output_names: Sequence[str], shared: Sequence[str] = ()
) -> Kernel:
    """Reads a .metal file that uses functions from `shared` files of metal_kernels/shared."""
    functions, body = path.read_text().split(BODY_MARKER)
    first_line = functions.count("\n") + 2
    files = [Part((_SHARED / name).read_text(), name, 1) for name in shared]
    files.append(Part(functions, path.name, 1))
    own = Part(body, path.name, first_line)
    return Kernel(
        name=path.stem,
        input_names=tuple(input_names),
        output_names=tuple(output_names),
        header=used(files, own),
        body=compact([own]),
    )


_compiler: Compiler = mx.fast.metal_kernel


def use(compiler: Compiler) -> None:
    """Makes every kernel run through `compiler` from now on."""
    global _compiler
    _compiler = compiler


def in_graphs() -> bool:
    """Returns whether kernel calls are lazy MLX operations, so that a graph can contain them."""
    # Other compilers run kernels when they are called, so a graph with them cannot be traced.
    return _compiler is mx.fast.metal_kernel


@contextmanager
def using(compiler: Compiler) -> Iterator[None]:
    """Makes every kernel run through `compiler` within a `with` block."""
    before = _compiler
    use(compiler)
    try:
        yield
    finally:
        use(before)


def named(compiler: str) -> Compiler:
    """Imports a compiler by its name, `module:function`.

    Raises RuntimeError: the package of the module is not installed.
    """
    module = compiler.partition(":")[0]
    try:
        found: Compiler = pkgutil.resolve_name(compiler)
    except ModuleNotFoundError as missing:
        if missing.name != module:
            raise
        raise RuntimeError(f"the package {module} is not installed") from missing
    return found


@functools.cache
def _compiled(compiler: Compiler, kernel: Kernel) -> Callable[..., list[mx.array]]:
    return compiler(
        name=kernel.name,
        input_names=list(kernel.input_names),
        output_names=list(kernel.output_names),
        source=kernel.body,
        header=kernel.header,
    )
