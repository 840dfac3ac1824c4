# SPDX-License-Identifier: Apache-2.0
"""Kernels that run nothing: whoever made them is told of each call, as a compiler knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from .declaration import Declaration, declaring
from .kernel_call import Scalar
from .signature import Signature, TemplateArgument


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
    declared: Declaration

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
        declared = self.declared
        signature = declared.signature(arrays, output_dtypes, template)
        self.called(Call(signature, declared.header, declared.source, threadgroup))
        return [
            mx.zeros(tuple(shape), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]


def unrun(called: Callable[[Call], None]) -> Callable[..., UnrunKernel]:
    """What takes the place of `mx.fast.metal_kernel`, and tells `called` of its kernels' calls."""
    return declaring(partial(UnrunKernel, called))
