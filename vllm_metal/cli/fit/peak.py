# SPDX-License-Identifier: Apache-2.0
"""Computes the peak memory of MLX for a graph, without running it.

This is the peak if MLX waits for each operation. If MLX runs ahead of the device, the arrays of
pending operations come on top.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal.cli.fit.graph import Graph, Operation

# The order of operations and the reuse of memory follow MLX (`eval_impl` in mlx/transforms.cpp;
# `set_unary_output_data`, `set_binary_op_output_data` and `set_copy_output_data` in
# mlx/backend/common). An output is allocated when its operation runs, or placed in the memory of an
# input that nothing else needs; inputs are freed after the operation.

_RESHAPES = {"ExpandDims", "Flatten", "Reshape", "Squeeze", "Unflatten"}
_VIEWS = {"Broadcast", "BroadcastAxes", "Copy", "Slice", "Split", "StopGradient", "Transpose"}
#: Operations that may reuse the memory of their first input.
_UPDATES = {"DynamicSliceUpdate", "MaskedScatter", "Scatter", "ScatterAxis", "SliceUpdate"}
#: Operations that may reuse the memory of any input.
_ELEMENTWISE_NAMES = """
    Abs Add AsType Ceil Contiguous Cos Divide Equal Erf Exp Expm1 Floor Greater GreaterEqual Less
    LessEqual Log Log1p LogAddExp LogicalAnd LogicalNot LogicalOr Maximum Minimum Multiply NaNEqual
    Negative NotEqual Power Remainder Round Rsqrt Select Sigmoid Sign Sin Softmax Sqrt Square
    Subtract Tan Tanh
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_PRODUCTS = {"AddMM", "GatherMM", "Matmul"}
_BFS_WIDTH = int(os.environ.get("MLX_BFS_MAX_WIDTH", 20))  # as MLX reads it
_SPARE = 16384  # bytes by which reused memory may be too large (MLX's `is_donatable`)


def peak(graph: Graph, outputs: Sequence[str], kept: Collection[str], free: Collection[str]) -> int:
    """Returns the peak bytes while `outputs` are computed.

    Args:
        graph: the graph that computes `outputs`.
        kept: arrays that stay allocated when they are no longer needed, like outputs, constants and
            `free`. Those that `outputs` do not need are not computed, but hold what they follow
            from.
        free: inputs that exist already and are not counted. Other inputs are allocated at their
            first use.
    """
    run = _Run(graph, {*outputs, *kept, *graph.constants, *free})
    for name in (*graph.constants, *free):
        run.place(name, counted=name not in free)
    late = [Operation("Full", (), (), (name,)) for name in graph.inputs if name not in free]
    operations = [*late, *graph.operations]
    order = _order(operations, outputs, run.there)
    computed = {operation.outputs for operation in order}
    for operation in _order(operations, [*kept], run.there):
        if operation.outputs not in computed:
            run.kept.update(operation.inputs)
    run.uses.update(name for operation in order for name in operation.inputs)
    for operation in order:
        run.step(operation)
    return run.highest


def _order(
    operations: Sequence[Operation], outputs: Sequence[str], available: Collection[str]
) -> list[Operation]:
    """Returns the operations that `outputs` need, in the order in which MLX runs them."""
    # MLX goes from the outputs to their inputs: breadth first as long as at most _BFS_WIDTH
    # operations wait, then depth first. An operation is listed once all its users are; the list
    # runs backwards.
    made_by = {name: operation for operation in operations for name in operation.outputs}
    last = Operation("Synchronizer", (), tuple(outputs), ())
    users: Counter[str] = Counter()  # by the operation's first output
    found, waiting = {last.outputs}, [last]
    while waiting:
        for name in waiting.pop().inputs:
            if name not in available:
                needed = made_by[name]
                users[needed.outputs[0]] += 1
                if needed.outputs not in found:
                    found.add(needed.outputs)
                    waiting.append(needed)
    tape, followed = [last], 0
    deep: list[tuple[Operation, int]] = []
    while followed < len(tape) or deep:
        if followed < len(tape):
            operation, start = tape[followed], 0
            followed += 1
        else:
            operation, start = deep.pop()
        for index, name in enumerate(operation.inputs[start:], start):
            if name in available:
                continue
            if len(tape) - followed >= _BFS_WIDTH:
                deep.append((operation, index))
                break
            needed = made_by[name]
            users[needed.outputs[0]] -= 1
            if not users[needed.outputs[0]]:
                tape.append(needed)
    return tape[:0:-1]


@dataclass
class _Buffer:
    nbytes: int
    counted: bool  # until no array is left in it
    arrays: int = 0


@dataclass(frozen=True)
class _Placement:
    buffer: _Buffer
    layout: np.ndarray  # without data: only shape, item size and strides


class _Run:
    def __init__(self, graph: Graph, kept: set[str]) -> None:
        self._graph = graph
        self.kept = kept
        self._now = self.highest = 0
        self.there: dict[str, _Placement] = {}  # computed arrays, by name
        self.uses: Counter[str] = Counter()  # remaining uses, by name

    def place(self, name: str, counted: bool) -> None:
        self._add(name, self._new(name, counted))

    def step(self, operation: Operation) -> None:
        inputs = [self.there[name] for name in operation.inputs]
        placed = [self._output(operation, index, inputs) for index in range(len(operation.outputs))]
        for name, output in zip(operation.outputs, placed, strict=True):
            self._add(name, output)
        copies = 0
        if operation.kind in _PRODUCTS:
            copies = sum(i.layout.nbytes for i in inputs[:2] if not _is_matrix(i.layout))
        self.highest = max(self.highest, self._now + copies)
        self.uses.subtract(operation.inputs)
        for name in {*operation.inputs, *operation.outputs}:
            if not self.uses[name] and name not in self.kept:
                self._release(name)

    def _add(self, name: str, placed: _Placement) -> None:
        placed.buffer.arrays += 1
        self.there[name] = placed

    def _release(self, name: str) -> None:
        buffer = self.there.pop(name).buffer
        buffer.arrays -= 1
        if not buffer.arrays and buffer.counted:
            self._now -= buffer.nbytes

    def _new(self, name: str, counted: bool = True) -> _Placement:
        shape, dtype = self._graph.arrays[name]
        nbytes = math.prod(shape) * dtype.size
        if counted:
            self._now += nbytes
            self.highest = max(self.highest, self._now)
        layout = _layout(shape, _row_major(shape, dtype.size), dtype.size)
        return _Placement(_Buffer(nbytes, counted), layout)

    def _output(self, operation: Operation, index: int, inputs: Sequence[_Placement]) -> _Placement:
        kind, name = operation.kind, operation.outputs[index]
        shape, _ = self._graph.arrays[name]
        if kind == "Depends":
            return inputs[index]
        if kind in _VIEWS:
            layout = _view(operation, index, inputs[0].layout, shape)
            return _Placement(inputs[0].buffer, layout)
        if kind in _RESHAPES:
            try:
                layout = np.reshape(inputs[0].layout, shape, copy=False)
            except ValueError:  # the strides do not allow a view
                return self._new(name)
            return _Placement(inputs[0].buffer, layout)
        if kind == "Contiguous" and inputs[0].layout.flags.c_contiguous:
            return inputs[0]
        if kind == "View" and inputs[0].layout.flags.c_contiguous:  # reinterpreted as another dtype
            size = self._graph.arrays[name][1].size
            return _Placement(inputs[0].buffer, _layout(shape, _row_major(shape, size), size))
        if kind in _UPDATES:
            return self._reuse_input(operation.inputs[:1], name) or self._new(name)
        if kind in _ELEMENTWISE or operation.opaque:
            return self._reuse_input(operation.inputs, name) or self._new_like(inputs, name)
        return self._new(name)

    def _reuse_input(self, inputs: Sequence[str], name: str) -> _Placement | None:
        shape, dtype = self._graph.arrays[name]
        nbytes = math.prod(shape) * dtype.size
        for source in inputs:
            layout, buffer = self.there[source].layout, self.there[source].buffer
            fit = layout.shape == shape and layout.itemsize == dtype.size and _is_dense(layout)
            # Another use, now or later, makes an input's memory unavailable.
            needed = self.uses[source] > 1 or source in self.kept or buffer.arrays > 1
            if fit and not needed and buffer.counted and buffer.nbytes <= nbytes + _SPARE:
                return self.there[source]
        return None

    def _new_like(self, inputs: Sequence[_Placement], name: str) -> _Placement:
        new = self._new(name)
        for placed in inputs:
            layout, size = placed.layout, new.layout.itemsize
            if layout.shape == new.layout.shape and _is_dense(layout):
                # Elementwise results keep the element order of their input.
                strides = [stride // layout.itemsize * size for stride in layout.strides]
                return _Placement(new.buffer, _layout(layout.shape, strides, size))
        return new


def _layout(shape: Sequence[int], strides: Sequence[int], item_size: int) -> np.ndarray:
    item = np.empty(1, f"V{item_size}")
    return np.lib.stride_tricks.as_strided(item, shape, strides, writeable=False)


def _row_major(shape: Sequence[int], item_size: int) -> list[int]:
    return [math.prod(shape[axis + 1 :]) * item_size for axis in range(len(shape))]


def _view(
    operation: Operation, index: int, layout: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    if operation.kind == "Transpose":
        return layout.transpose(operation.arguments[0])
    if operation.kind in ("Broadcast", "BroadcastAxes"):
        return np.broadcast_to(layout, shape)
    if operation.kind == "Slice":
        return layout[tuple(slice(*bounds) for bounds in zip(*operation.arguments, strict=True))]
    if operation.kind == "Split":
        positions, axis = operation.arguments
        return np.split(layout, positions, axis)[index]
    return layout


def _is_dense(layout: np.ndarray) -> bool:
    """Whether the elements fill one range of memory without gaps, in any order."""
    steps = zip(layout.shape, layout.strides, strict=True)
    return sum((n - 1) * stride for n, stride in steps) + layout.itemsize == layout.nbytes


def _is_matrix(layout: np.ndarray) -> bool:
    """Whether a matrix product reads the array without a copy: contiguous rows or columns."""
    if layout.ndim < 2 or 1 in layout.shape[-2:]:
        return True
    rows, columns = (stride // layout.itemsize for stride in layout.strides[-2:])
    return (rows, columns) in ((layout.shape[-1], 1), (1, layout.shape[-2]))
