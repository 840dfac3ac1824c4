# SPDX-License-Identifier: Apache-2.0
"""Arguments of `mx.fast.metal_kernel`, and functions that accept the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import mlx.core as mx

from .signature import Input, Mentions, Signature, TemplateArgument

_MATH_MODES = ("safe", "relaxed", "fast")

Kernel = TypeVar("Kernel")


@dataclass(frozen=True)
class Declaration:
    """A kernel's arguments of `mx.fast.metal_kernel`: buffer names, source text, options."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str  # the body
    header: str
    row_contiguous: bool  # whether inputs are copied that are not
    atomic_outputs: bool

    @cached_property
    def _mentions(self) -> Mentions:
        return Mentions.of(self.source, self.input_names)

    def signature(
        self,
        arrays: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[TemplateArgument] | None,
    ) -> Signature:
        """Returns the signature of the Metal function that MLX generates for such a call."""
        return Signature(
            self.name,
            self.input_names,
            self.output_names,
            tuple(Input.of(array) for array in arrays),
            tuple(output_dtypes),
            tuple(template or ()),
            self._mentions,
            self.atomic_outputs,
        )


def declaring(make: Callable[[Declaration], Kernel]) -> Callable[..., Kernel]:
    """Returns a function with the arguments and argument errors of `mx.fast.metal_kernel`.

    Args:
        make: makes the function's result from the declared kernel.
    """

    def metal_kernel(
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
    ) -> Kernel:
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        for option, value in (compile_options or {}).items():
            if option != "math_mode":
                raise ValueError(f"[metal_kernel] Unknown compile option `{option}`.")
            if value not in _MATH_MODES:
                raise ValueError(
                    "[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'."
                )
        names = tuple(input_names), tuple(output_names)
        return make(
            Declaration(name, *names, source, header, ensure_row_contiguous, atomic_outputs)
        )

    return metal_kernel
