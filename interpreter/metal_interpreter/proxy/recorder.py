# SPDX-License-Identifier: Apache-2.0
"""Records calls of kernels, so that what operations launch can be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..kernel_call import Scalar
from ..signature import Input, Mentions, Signature, TemplateArgument
from .unit import Call


@dataclass(frozen=True, eq=False)
class Recorder:
    """Makes kernels like `mx.fast.metal_kernel` that run nothing: outputs are zeros."""

    #: Each once, in the order of the first call of it.
    calls: list[Call] = field(default_factory=list)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
    ) -> RecordedKernel:
        """As `mx.fast.metal_kernel`."""
        return RecordedKernel(
            self.calls, name, tuple(input_names), tuple(output_names), source, header
        )


@dataclass(frozen=True, eq=False)
class RecordedKernel:
    """A kernel whose calls are recorded."""

    calls: list[Call]  # of all kernels
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str

    def __call__(
        self,
        *,
        inputs: Sequence[Scalar | mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        threadgroup: tuple[int, int, int],
        grid: tuple[int, int, int],
        template: Sequence[TemplateArgument] | None = None,
        **other: object,
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
            atomic_outputs=False,
        )
        call = Call(signature, self.header, self.source, threadgroup)
        if call not in self.calls:
            self.calls.append(call)
        return [
            mx.zeros(tuple(shape), dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
