# SPDX-License-Identifier: Apache-2.0
"""Generates the Metal function that MLX generates around the body of a custom kernel.

`mx.fast.metal_kernel` derives the function's parameters from the names of the buffers, the types of
the arrays, and the names that occur in the body. The text is MLX 0.32's, byte for byte (the tests
compare it with the text that MLX records when it exports a kernel).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from metal_kernels.kernel import MIN_ELEMENTS

TemplateArgument = tuple[str, bool | int | mx.Dtype]

_TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# Position attributes that a body may use, in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


def type_name(dtype: mx.Dtype) -> str:
    """Returns Metal's name of an MLX dtype; raises ValueError if Metal lacks it (float64)."""
    if dtype not in _TYPE_NAMES:
        raise ValueError(f"[metal_kernel] Metal has no {dtype}.")
    return _TYPE_NAMES[dtype]


@dataclass(frozen=True)
class Input:
    """Properties of an input array that the generated signature depends on."""

    dtype: mx.Dtype
    scalar: bool  # no dimensions: passed by reference
    small: bool  # fewer than MIN_ELEMENTS: in the constant address space

    @staticmethod
    def of(array: mx.array) -> Input:
        return Input(array.dtype, array.ndim == 0, array.size < MIN_ELEMENTS)


@dataclass(frozen=True)
class Parameter:
    """One buffer argument of the generated function."""

    name: str
    type: str  # as written, such as "const device float*"
    index: int  # [[buffer(index)]]
    array: int  # number of the input or output it belongs to
    role: str  # "input", "shape", "strides", "ndim" or "output"


@dataclass(frozen=True)
class Mentions:
    """Extra parameters that MLX adds because their names occur in the kernel's body."""

    shapes: tuple[tuple[bool, bool, bool], ...]  # per input: shape, strides, ndim
    attributes: tuple[str, ...]

    @staticmethod
    def of(source: str, input_names: Sequence[str]) -> Mentions:
        return Mentions(
            tuple(
                (f"{name}_shape" in source, f"{name}_strides" in source, f"{name}_ndim" in source)
                for name in input_names
            ),
            tuple(name for name in ATTRIBUTES if name in source),
        )


@dataclass(frozen=True)
class Signature:
    """The generated function for one combination of types and template arguments."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    inputs: tuple[Input, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    template: tuple[TemplateArgument, ...]
    mentions: Mentions
    atomic_outputs: bool

    @cached_property
    def function(self) -> str:
        """The function's name, which is different for each combination of types."""
        parts = ["custom_kernel_" + self.name]
        if self.template:
            parts.append(re.sub(r"<|>|-|(, )", "_", self.arguments)[:-1])
        parts += [
            type_name(x.dtype) + ("s" if x.scalar else "c" if x.small else "") for x in self.inputs
        ]
        parts += [type_name(dtype) for dtype in self.output_dtypes]
        return "_".join(parts)

    @cached_property
    def arguments(self) -> str:
        """The template arguments as text, such as `<float, 3, 1>`; empty if there are none."""
        if not self.template:
            return ""
        values = (
            type_name(value) if isinstance(value, mx.Dtype) else str(int(value))
            for _, value in self.template
        )
        return "<" + ", ".join(values) + ">"

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        found: list[Parameter] = []

        def add(name: str, type: str, array: int, role: str) -> None:
            found.append(Parameter(name, type, len(found), array, role))

        for i, (name, x) in enumerate(zip(self.input_names, self.inputs, strict=True)):
            space = "constant" if x.small else "device"
            reference = "&" if x.scalar else "*"
            add(name, f"const {space} {type_name(x.dtype)}{reference}", i, "input")
            if x.scalar:
                continue
            shape, strides, ndim = self.mentions.shapes[i]
            if shape:
                add(f"{name}_shape", "const constant int*", i, "shape")
            if strides:
                add(f"{name}_strides", "const constant int64_t*", i, "strides")
            if ndim:
                add(f"{name}_ndim", "const constant int&", i, "ndim")
        for i, (name, dtype) in enumerate(zip(self.output_names, self.output_dtypes, strict=True)):
            type = type_name(dtype)
            add(name, f"device {f'atomic<{type}>' if self.atomic_outputs else type}*", i, "output")
        return tuple(found)

    @property
    def head(self) -> str:
        """The function's text from `template <...>` to the opening brace."""
        text = ""
        if self.template:
            names = (f"{_parameter_kind(value)} {name}" for name, value in self.template)
            text += "template <" + ", ".join(names) + ">\n"
        text += f"[[kernel]] void {self.function}(\n"
        # MLX ends the list at the buffer whose number is that of the arrays, also where shapes
        # come in between and more outputs follow: such a body must mention an attribute.
        last = len(self.inputs) + len(self.output_names) - 1
        for p in self.parameters:
            text += f"  {p.type} {p.name} [[buffer({p.index})]]"
            more = p.role != "output" or p.index < last or self.mentions.attributes
            text += ",\n" if more else ") {\n"
        attributes = [f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in self.mentions.attributes]
        if attributes:
            text += ",\n".join(attributes) + ") {\n"
        return text

    @property
    def instantiation(self) -> str:
        """Text after the function that instantiates its template; empty without a template."""
        if not self.template:
            return ""
        called = self.function + self.arguments
        return (
            f'\ntemplate [[host_name("{self.function}")]] [[kernel]] decltype({called}) {called};\n'
        )

    def text(self, header: str, source: str) -> str:
        """Returns the text that MLX passes to Metal's compiler after its own definitions."""
        return f"{header}{self.head}{source}\n}}\n{self.instantiation}"


def _parameter_kind(value: bool | int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"
