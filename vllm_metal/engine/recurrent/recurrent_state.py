# SPDX-License-Identifier: Apache-2.0
"""Stores states of recurrent and convolution layers in the pool's blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import BITS
from metal_kernels.sequences import StatePart
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import Fenced, LayerState, Pending, PlanT, Traceable

#: Alignment in bytes of each part of a state: kernels load this many at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class StateFormat:
    """Fixed shapes and dtypes of the arrays in a layer's state."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one state with aligned parts."""
        return sum(self.part_bytes)

    @cached_property
    def end(self) -> int:
        """Bytes of one state up to its last element."""
        last = self.parts[-1]
        return last.start + math.prod(last.shape) * last.dtype.size

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part, rounded up to the next one's start."""
        sizes = (math.prod(s) * d.size for s, d in zip(self.shapes, self.dtypes, strict=True))
        return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def numbers(self, start: int, size: int) -> tuple[tuple[mx.Dtype, int], ...]:
        """Splits `size` bytes of a state from `start` into (dtype, bytes) pieces."""
        found, at, stop = [], 0, start + size
        for dtype, nbytes in zip(self.dtypes, self.part_bytes, strict=True):
            inside = min(at + nbytes, stop) - max(at, start)
            if inside > 0:
                found.append((dtype, inside))
            at += nbytes
        return tuple(found)

    def to_bits(self, parts: Sequence[mx.array], size: int) -> mx.array:
        """Packs [n, *shape] parts into [n, nbytes / size] integers of `size` bytes."""
        rows = []
        for part, dtype, nbytes in zip(parts, self.dtypes, self.part_bytes, strict=True):
            flat = part.reshape(len(part), -1)
            missing = nbytes // dtype.size - flat.shape[1]
            flat = mx.pad(flat, [(0, 0), (0, missing)]) if missing else flat
            rows.append(flat.view(BITS[size]))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def from_bits(self, bits: mx.array) -> list[mx.array]:
        """Unpacks [n, w] integers, one state of `nbytes` or more per row, into its arrays."""
        size, start, parts = bits.dtype.size, 0, []
        for shape, dtype, nbytes in zip(self.shapes, self.dtypes, self.part_bytes, strict=True):
            stop = start + nbytes // size
            flat, count = mx.contiguous(bits[:, start:stop]).view(dtype), math.prod(shape)
            flat = flat[:, :count] if count < flat.shape[1] else flat
            parts.append(flat.reshape(len(bits), *shape))
            start = stop
        return parts

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """Byte offset, shape and dtype of each part."""
        starts = np.cumsum((0, *self.part_bytes)).tolist()
        columns = zip(starts[:-1], self.shapes, self.dtypes, strict=True)
        return tuple(StatePart(*column) for column in columns)


class RecurrentState(LayerState, Traceable, Generic[PlanT]):
    """Recurrent states in the memory of K and V.

    A block of the pool belongs to one KV cache group at a time, so layers of several groups share
    memory. In a recurrent layer's block, the bytes of K, then of V, hold a state.
    """

    def __init__(self, storage: LayerKVCache, form: StateFormat) -> None:
        """Uses a layer's K and V, or memory from `KVBackend.allocate_states`.

        Raises ValueError: a state does not fit in a block.
        """
        sizes = storage.block_bytes
        if form.nbytes > sum(sizes):
            raise ValueError(
                f"a block of {sum(sizes)} bytes has no room for a state of {form.nbytes} bytes"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._num_used = sum(start < form.nbytes for start in starts)
        spans = list(zip(starts, sizes, strict=True))[: self._num_used]
        self._numbers = [form.numbers(*span) for span in spans]
        self._storage, self.form = storage, form
        self._element_bytes = storage.dtype.size
        self._width = form.nbytes // self._element_bytes  # elements of a state
        self._pending: list[Pending[PlanT]] = []  # state arrays of each plan's forward

    @property
    def storage(self) -> LayerKVCache:
        return self._storage

    @property
    def page_arrays(self) -> list[mx.array]:
        return self._storage.elements_of(self._storage.arrays)[: self._num_used]

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        return self._numbers

    def move(self, source: int, target: int) -> mx.array:
        """Copies a state between blocks; returns an array that is computed after the copy."""
        states = self._storage.read_states(None, mx.array([source], mx.int32), self._width)
        self._storage.write_states(np.array([target]), states)
        assert isinstance(self._storage, Fenced)  # else there is nothing to compile
        return mx.stack(list(self._storage.fences))

    def wait_for_device(self) -> None:
        self._storage.wait_for_device()
        if self._pending:
            self.begin_step()
            self._storage.wait_for_device()

    @property
    def traceable(self) -> bool:
        return self._storage.traceable

    @property
    def inputs(self) -> list[mx.array]:
        """Always empty: the storage itself lists the arrays that hold the states."""
        return []

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        pending, self._pending = self._pending, []
        try:
            yield
        finally:
            self._pending = pending

    @property
    def outputs(self) -> list[Pending[PlanT]]:
        return list(self._pending)

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[PlanT]]) -> None:
        self._pending += outputs

    def read(self, plan: PlanT, blocks: mx.array) -> list[mx.array]:
        """Returns [n, *shape] parts of the states in [n] blocks."""
        return self.form.from_bits(self._storage.read_states(plan, blocks, self._width))

    def write(self, blocks_np: np.ndarray, parts: Sequence[mx.array]) -> None:
        """Writes [n, *shape] parts into [n] blocks."""
        self._storage.write_states(blocks_np, self.form.to_bits(parts, self._element_bytes))
