# SPDX-License-Identifier: Apache-2.0
"""Kernels that run nothing: whoever made them is told of each call, as a compiler knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .kernel_call import Scalar
from .signature import Input, Mentions, Signature, TemplateArgument


@dataclass(frozen=True)
class Call:
    """A kernel, and what its compiler knows of a call: types, template arguments, threadgroup."""

    signature: Signature
    header: str
    source: str
    threadgroup: tuple[int, int, int]

    @property
    def kernel(self) -> str:
        return self.signature.name

    @property
    def template(self) -> dict[str, bool | int | mx.Dtype]:
        return dict(self.signature.template)

    @property
    def threads(self) -> int:
        x, y, z = self.threadgroup
        return x * y * z


@dataclass(frozen=True, eq=False)
class UnrunKernel:
    """A kernel like MLX's, whose outputs are zeros."""

    called: Callable[[Call], None]
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    atomic_outputs: bool

    def __call__(
        self,
        *,
        inputs: Sequence[Scalar | mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        threadgroup: tuple[int, int, int],
        template: Sequence[TemplateArgument] | None = None,
        **dispatch: object,
    ) -> list[mx.array]:
        """Takes MLX's arguments.

        Returns:
            Zeros of the shapes and dtypes asked for.
        """
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        signature = Signature(
            self.name,
            self.input_names,
            self.output_names,
            tuple(Input.of(array) for array in arrays),
            tuple(output_dtypes),
            tuple(template or ()),
            Mentions.of(self.source, self.input_names),
            self.atomic_outputs,
        )
        self.called(Call(signature, self.header, self.source, threadgroup))
        return [
            mx.zeros(tuple(shape), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]


def unrun(called: Callable[[Call], None]) -> Callable[..., UnrunKernel]:
    """What takes the place of `mx.fast.metal_kernel`, and tells `called` of its kernels' calls."""

    def metal_kernel(
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
    ) -> UnrunKernel:
        names = tuple(input_names), tuple(output_names)
        return UnrunKernel(called, name, *names, source, header, atomic_outputs)

    return metal_kernel
