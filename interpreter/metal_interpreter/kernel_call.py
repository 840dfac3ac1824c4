# SPDX-License-Identifier: Apache-2.0
"""Replaces `mx.fast.metal_kernel` by a function that makes kernels which run on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from . import memory, toolchain, translate
from .declaration import Declaration, declaring
from .launch import Buffer, Program, Result, Schedule, dispatch, load
from .signature import Input, Parameter, Signature, TemplateArgument

# Limits of every Apple GPU.
MAX_THREADS = 1024
MAX_BUFFERS = 31

Scalar = bool | int | float
Observer = Callable[[str, Sequence[Buffer], Result], None]

_KIND = {"input": 0, "output": 1, "shape": 2, "strides": 2, "ndim": 2}


@dataclass(frozen=True)
class Executor:
    """Settings for running kernels: compile mode, thread schedule, and observer of dispatches."""

    mode: toolchain.Mode
    schedule: Schedule
    observe: Observer | None = None

    @property
    def metal_kernel(self) -> Callable[..., MetalKernel]:
        """Replacement for `mx.fast.metal_kernel`, with the same arguments and errors."""
        return declaring(partial(MetalKernel, self))


class MetalKernel:
    """A kernel that runs on the CPU; compiled at the first call with a combination of types."""

    def __init__(self, executor: Executor, declaration: Declaration) -> None:
        self._executor, self._declared = executor, declaration
        self._compiled: dict[tuple[object, ...], tuple[Signature, Program]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Scalar | mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[TemplateArgument] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: mx.Stream | mx.Device | None = None,
    ) -> list[mx.array]:
        """Runs the kernel immediately, with the arguments of MLX's kernels; returns its outputs.

        Raises:
            ValueError: MLX would reject the call.
            CompileError: the kernel does not compile.
            KernelViolation: the mode detected behavior that is undefined on a GPU.
        """
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        self._check_counts(arrays, output_shapes, output_dtypes)
        grid, threadgroup = _dispatch_size(grid, threadgroup)
        signature, program = self._program(arrays, tuple(output_dtypes), tuple(template or ()))
        declared = self._declared
        if verbose:
            text = signature.text(declared.header, declared.source)
            print(f"Generated source code for `{declared.name}`:\n```\n{text}\n```")
        keep_alive: list[object] = []
        outputs = [
            memory.allocate(tuple(shape), dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        if arrays:
            mx.eval(arrays)
        views = []
        for array in arrays:
            if declared.row_contiguous:
                array, seen = memory.row_contiguous(array)
            else:
                seen = memory.view(array)
            keep_alive.append(array)
            views.append((array, seen))
        buffers = [
            _bind(p, views, outputs, init_value is not None, keep_alive)
            for p in signature.parameters
        ]
        result = dispatch(
            program, declared.name, buffers, grid, threadgroup, self._executor.schedule
        )
        if self._executor.observe is not None:
            self._executor.observe(declared.name, buffers, result)
        return outputs

    def _check_counts(
        self,
        arrays: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> None:
        for what, got, names in (
            ("inputs", arrays, self._declared.input_names),
            ("output_shapes", output_shapes, self._declared.output_names),
            ("output_dtypes", output_dtypes, self._declared.output_names),
        ):
            if len(got) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} "
                    f"but got size {len(got)}."
                )

    def _program(
        self,
        arrays: Sequence[mx.array],
        output_dtypes: tuple[mx.Dtype, ...],
        template: tuple[TemplateArgument, ...],
    ) -> tuple[Signature, Program]:
        inputs = tuple(Input.of(array) for array in arrays)
        # True == 1, but a bool and an int make two kernels: the key needs their types.
        key = (inputs, output_dtypes, template, tuple(type(value) for _, value in template))
        found = self._compiled.get(key)
        if found is None:
            declared = self._declared
            signature = declared.signature(arrays, output_dtypes, _checked(template))
            if len(signature.parameters) > MAX_BUFFERS:
                raise ValueError(
                    f"[metal_kernel] {declared.name} needs {len(signature.parameters)} buffers; "
                    f"Metal binds {MAX_BUFFERS}."
                )
            text = translate.unit(signature, declared.header, declared.source)
            mode = self._executor.mode
            found = signature, load(toolchain.build_kernel(text, mode), mode)
            self._compiled[key] = found
        return found


def _checked(template: tuple[TemplateArgument, ...]) -> tuple[TemplateArgument, ...]:
    for _, value in template:
        if not isinstance(value, bool | int | mx.Dtype):
            raise ValueError(
                "[metal_kernel] Invalid template argument. "
                "Must be `mlx.core.Dtype`, `int` or `bool`."
            )
    return template


def _dispatch_size(
    grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Checks grid and threadgroup, and limits the threadgroup to the grid's size, as MLX does."""
    gx, gy, gz = grid
    tx, ty, tz = threadgroup
    if min(gx, gy, gz, tx, ty, tz) < 1:
        raise ValueError(f"[metal_kernel] empty grid {grid} or threadgroup {threadgroup}.")
    if tx * ty * tz > MAX_THREADS:
        raise ValueError(
            f"Thread group size ({tx * ty * tz}) is greater than  the maximum allowed threads per "
            f"threadgroup ({MAX_THREADS})."
        )
    return (gx, gy, gz), (min(tx, gx), min(ty, gy), min(tz, gz))


def _bind(
    parameter: Parameter,
    inputs: Sequence[tuple[mx.array, memory.View]],
    outputs: Sequence[mx.array],
    initialized: bool,
    keep_alive: list[object],
) -> Buffer:
    kind = _KIND[parameter.role]
    if parameter.role == "output":
        array = outputs[parameter.array]
        address = memory.view(array).address
        return Buffer(parameter.name, address, array.nbytes, array.itemsize, kind, initialized)
    array, view = inputs[parameter.array]
    if parameter.role == "input":
        span = _span(view) * array.itemsize
        return Buffer(parameter.name, view.address, span, array.itemsize, kind, True)
    values: ctypes.Array[ctypes.c_int32] | ctypes.Array[ctypes.c_int64]
    if parameter.role == "strides":
        values = (ctypes.c_int64 * array.ndim)(*view.strides)
    elif parameter.role == "shape":
        values = (ctypes.c_int32 * array.ndim)(*array.shape)
    else:
        values = (ctypes.c_int32 * 1)(array.ndim)
    keep_alive.append(values)
    size = ctypes.sizeof(values)
    element = size // len(values)
    return Buffer(parameter.name, ctypes.addressof(values), size, element, kind, True)


def _span(view: memory.View) -> int:
    """Number of elements between the view's first and last one, both included."""
    if 0 in view.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


metal_kernel = Executor(toolchain.RUN, Schedule(0)).metal_kernel
