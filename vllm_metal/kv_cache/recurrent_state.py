# SPDX-License-Identifier: Apache-2.0
"""States of recurrent and convolution layers, in the pool's blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import BITS
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import (
    Fenced,
    LayerState,
    Pending,
    Restorable,
    Traceable,
    joined,
)
from vllm_metal.kv_cache.run_plan import RunPlan, Run

#: Each part of a state begins at a multiple of this: of the bytes of any dtype.
_ALIGNMENT = 4
#: Rows of a sequence from which on a copy of its state costs less than what the state holds on to.
_LONG = 16


@dataclass(frozen=True)
class StateFormat:
    """What a layer keeps of a request: arrays of fixed shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one state, its parts aligned."""
        return sum(self.part_bytes)

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part, rounded up to where the next one begins."""
        sizes = (math.prod(s) * d.size for s, d in zip(self.shapes, self.dtypes, strict=True))
        return tuple(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)

    def numbers(self, start: int, size: int) -> tuple[tuple[mx.Dtype, int], ...]:
        """What `size` bytes of a state from `start` on are numbers of: bytes of each dtype."""
        found, at, stop = [], 0, start + size
        for dtype, nbytes in zip(self.dtypes, self.part_bytes, strict=True):
            inside = min(at + nbytes, stop) - max(at, start)
            if inside > 0:
                found.append((dtype, inside))
            at += nbytes
        return tuple(found)

    def to_bits(self, parts: Sequence[mx.array], size: int) -> mx.array:
        """[n, nbytes / size] integers of `size` bytes: [n, *shape] parts one after another."""
        rows = []
        for part, dtype, nbytes in zip(parts, self.dtypes, self.part_bytes, strict=True):
            flat = part.reshape(len(part), -1)
            missing = nbytes // dtype.size - flat.shape[1]
            flat = mx.pad(flat, [(0, 0), (0, missing)]) if missing else flat
            rows.append(flat.view(BITS[size]))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def from_bits(self, bits: mx.array) -> list[mx.array]:
        """The parts again of [n, at least nbytes / size] integers of `size` bytes."""
        size, start, parts = bits.dtype.size, 0, []
        for shape, dtype, nbytes in zip(self.shapes, self.dtypes, self.part_bytes, strict=True):
            stop = start + nbytes // size
            flat, count = mx.contiguous(bits[:, start:stop]).view(dtype), math.prod(shape)
            flat = flat[:, :count] if count < flat.shape[1] else flat
            parts.append(flat.reshape(len(bits), *shape))
            start = stop
        return parts


class RecurrentState(LayerState, Traceable, Restorable):
    """States in the memory of K and V.

    A block of the pool belongs to one KV cache group at a time, so layers of several groups share
    memory: of a block that is a recurrent layer's, the rows of K, then of V, hold a state's bits.
    What a step computed is written when the next one begins: by then it is known which drafts were
    kept. Without drafts nobody waits for that where the storage is `pipelined`.
    """

    def __init__(self, storage: LayerKVCache, form: StateFormat) -> None:
        """
        Args:
            storage: that states lie in: a layer's K and V, or memory `of_states` alone.
            form: of the states.

        Raises:
            ValueError: a block has no room for a state.
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
        self._storage, self._form = storage, form
        self._element_bytes = storage.dtype.size
        self._width = form.nbytes // self._element_bytes  # elements of a state
        self._pending: list[Pending[RunPlan]] = []  # the states that each plan ends with
        self._last_rows_np: np.ndarray | None = None

    @property
    def storage(self) -> LayerKVCache:
        return self._storage

    @property
    def page_arrays(self) -> list[mx.array]:
        return self._storage.elements_of(self._storage.arrays)[: self._num_used]

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        return self._numbers

    def begin_step(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        last_rows_np, self._last_rows_np = self._last_rows_np, None
        blocks, states = [], []
        for written in pending:
            endings = written.plan.endings
            wanted = endings.wanted(last_rows_np)
            blocks.append(endings.blocks_np[wanted])
            everything = len(wanted) == len(endings.blocks_np)
            indices = mx.array(wanted.astype(np.int32))
            states.append(
                written.arrays if everything else [part[indices] for part in written.arrays]
            )
        blocks_np = np.concatenate(blocks)
        if len(blocks_np):
            parts = [joined(parts) for parts in zip(*states, strict=True)]
            self._storage.write_states(blocks_np, self._form.to_bits(parts, self._element_bytes))

    def move(self, source: int, target: int) -> mx.array:
        """Copies a state from block to block; returns what is computed once it is there."""
        states = self._storage.read_states(None, mx.array([source], mx.int32), self._width)
        self._storage.write_states(np.array([target]), states)
        assert isinstance(self._storage, Fenced)  # else there is nothing to compile
        return mx.stack(list(self._storage.fences))

    def wait_for_device(self) -> None:
        self._storage.wait_for_device()
        if self._pending:
            self.begin_step()
            self._storage.wait_for_device()

    def restore(self, last_rows_np: np.ndarray) -> None:
        self._last_rows_np = last_rows_np

    @property
    def traceable(self) -> bool:
        return self._storage.traceable

    @property
    def inputs(self) -> list[mx.array]:
        """No arrays: states are read from the storage, which lists its own."""
        return []

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        pending, self._pending = self._pending, []
        try:
            yield
        finally:
            self._pending = pending

    @property
    def outputs(self) -> list[Pending[RunPlan]]:
        return list(self._pending)

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[RunPlan]]) -> None:
        self._pending += outputs

    def run(
        self,
        plan: RunPlan,
        compute: Callable[[mx.array, list[mx.array]], tuple[list[mx.array], list[mx.array]]],
    ) -> list[mx.array]:
        """A layer's call over the step's rows, sequence by sequence.

        Args:
            plan: of the step.
            compute: takes [n, L] int32 rows and the [n, *shape] parts of the states before them;
                returns the layer's results, each [n, L, ...], and the parts of the states after.

        Returns:
            The results, each [T, 1, ...].
        """
        bits = self._storage.read_states(plan, plan.before, self._width)
        states = self._form.from_bits(bits)
        if plan.fresh is not None:
            states = [_zero_where(plan.fresh, part) for part in states]
        results: list[list[mx.array]] = []
        ended: list[list[mx.array]] = []
        for run in plan.runs:
            of_run = states if run.requests is None else [part[run.requests] for part in states]
            found, after = compute(run.rows, of_run)
            dtypes = self._form.dtypes
            after = [part.astype(dtype) for part, dtype in zip(after, dtypes, strict=True)]
            results.append([result.flatten(0, 1)[:, None] for result in found])
            ended.append([_ending(run, part) for part in after])
            if run.requests is None:
                states = after
            else:
                states = [
                    _put(part, run.requests, new) for part, new in zip(states, after, strict=True)
                ]
        kept = [joined(parts) for parts in zip(*ended, strict=True)]
        self._pending.append(Pending(plan, kept))
        whole = [joined(parts) for parts in zip(*results, strict=True)]
        # With the results, or what states are cut from would be held until the next step begins.
        whole = mx.depends(whole, kept)
        return whole if plan.places is None else [result[plan.places] for result in whole]


def _ending(run: Run, part: mx.array) -> mx.array:
    """Selects the end states of a run that later steps may need, of [n, ...] states after it."""
    if run.kept is not None:
        return part[run.kept]
    if run.rows.shape[1] < _LONG:
        return part
    return mx.take(part, mx.arange(len(part)), 0)  # it may be a view of all that the module read


def _zero_where(fresh: mx.array, part: mx.array) -> mx.array:
    return mx.where(fresh.reshape(-1, *[1] * (part.ndim - 1)), mx.zeros((), part.dtype), part)


def _put(part: mx.array, requests: mx.array, new: mx.array) -> mx.array:
    """Returns a copy of `part`, [R, ...], whose rows `requests` are replaced by `new`, [n, ...]."""
    copied = mx.contiguous(part)  # another array: this one may be wanted as it is
    copied[requests] = new
    return copied
