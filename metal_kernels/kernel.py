# SPDX-License-Identifier: Apache-2.0
"""Makes a kernel run: its text and buffers, and the compiler for it.

A .metal file holds functions, then a line `// ---- kernel body`, then the body of the kernel, whose
signature `mx.fast.metal_kernel` generates from the names of its buffers. The compiler is that
function, on a Mac, or another of the same signature, such as the interpreter's, anywhere.
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

#: The line between the functions and the body of a .metal file.
BODY_MARKER = "// ---- kernel body\n"
#: MLX passes inputs of fewer elements in the constant address space. That is another signature, so
#: another kernel to compile, and a kernel cannot write through such an input.
MIN_ELEMENTS = 8

_SHARED = Path(__file__).parent / "shared"

Compiler = Callable[..., Any]  # mx.fast.metal_kernel, or what has its signature


@dataclass(frozen=True)
class Kernel:
    """One kernel; compiled for each set of template arguments when first called with them."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str  # functions
    body: str

    def __call__(self, **call: Any) -> list[mx.array]:
        """Takes the arguments of a kernel made by `mx.fast.metal_kernel`, by name."""
        return _compiled(_compiler, self)(**call)


def load(
    path: Path, input_names: Sequence[str], output_names: Sequence[str], shared: Sequence[str] = ()
) -> Kernel:
    """Reads a .metal file; `shared` names files of metal_kernels/shared whose functions it uses."""
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
    """Whether kernels are operations of MLX, which run when their results are computed.

    Those of another compiler run when they are called, so that a graph of them cannot be traced.
    """
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
    """The compiler of the name `module:function`, which a package beside this one may bring.

    Raises:
        RuntimeError: that package is not installed.
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
