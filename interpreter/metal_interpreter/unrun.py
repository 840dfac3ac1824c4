# SPDX-License-Identifier: Apache-2.0
"""Kernels that do not run, but pass each call's compile-time arguments to a callback."""

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
    """A kernel, and a call's compile-time facts: types, template arguments, threadgroup size."""

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
    """A kernel that passes each call to `called` and returns zeros."""

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
        """Takes the arguments of MLX's kernels; returns zeros of the given shapes and dtypes."""
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        declared = self.declared
        signature = declared.signature(arrays, output_dtypes, template)
        self.called(Call(signature, declared.header, declared.source, threadgroup))
        return [
            mx.zeros(tuple(shape), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]


def unrun(called: Callable[[Call], None]) -> Callable[..., UnrunKernel]:
    """Returns a replacement for `mx.fast.metal_kernel`; its kernels pass each call to `called`."""
    return declaring(partial(UnrunKernel, called))
