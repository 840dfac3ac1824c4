# SPDX-License-Identifier: Apache-2.0
"""States of recurrent and convolution layers, in the pool's blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import LayerState, Written
from vllm_metal.kv_cache.recurrent_plan import RecurrentPlan

#: Each part of a state begins at a multiple of this: of the bytes of any dtype.
_ALIGNMENT = 4
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}  # by the bytes of a dtype


@dataclass(frozen=True)
class StateFormat:
    """What a layer keeps of a request: arrays of fixed shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def nbytes(self) -> int:
        """Of one state, its parts aligned."""
        return sum(self.part_bytes)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of each part, rounded up to where the next one begins."""
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
            flat = mx.pad(flat, [(0, 0), (0, nbytes // dtype.size - flat.shape[1])])
            rows.append(flat.view(_BITS[size]))
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def from_bits(self, bits: mx.array) -> list[mx.array]:
        """The parts again of [n, at least nbytes / size] integers of `size` bytes."""
        size, start, parts = bits.dtype.size, 0, []
        for shape, dtype, nbytes in zip(self.shapes, self.dtypes, self.part_bytes, strict=True):
            stop = start + nbytes // size
            flat = mx.contiguous(bits[:, start:stop]).view(dtype)[:, : math.prod(shape)]
            parts.append(flat.reshape(len(bits), *shape))
            start = stop
        return parts


class StateBlocks:
    """States in arrays of their own: one for each part, block by block."""

    block_axis = 0
    split = 1

    def __init__(self, num_blocks: int, form: StateFormat) -> None:
        self.form = form
        self.arrays = [
            mx.zeros((num_blocks, *shape), dtype)
            for shape, dtype in zip(form.shapes, form.dtypes, strict=True)
        ]

    @property
    def used(self) -> list[mx.array]:
        """The arrays whose blocks hold states."""
        return self.arrays

    @property
    def numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        """See LayerState.page_numbers."""
        return [()] * len(self.arrays)

    def settle(self) -> None:
        """Nobody else writes these arrays."""

    def read(self, arrays: Sequence[mx.array], blocks: mx.array) -> list[mx.array]:
        """[n, *shape] parts of [n] blocks; `arrays` stand for the storage's."""
        return [array[blocks] for array in arrays]

    def write(self, blocks_np: np.ndarray, parts: Sequence[mx.array]) -> None:
        """Puts [n, *shape] parts into [n] blocks, none of them twice, in place."""
        blocks = mx.array(blocks_np)
        for array, part in zip(self.arrays, parts, strict=True):
            array[blocks] = part


class SharedBlocks:
    """States in the memory of K and V.

    A block of the pool belongs to one KV cache group at a time, so layers of several groups share
    memory: of a block that is a recurrent layer's, the rows of K, then of V, hold a state's bits.
    """

    def __init__(self, kv_cache: LayerKVCache, form: StateFormat) -> None:
        """
        Args:
            kv_cache: whose memory it is.
            form: of the states.

        Raises:
            ValueError: a block has no room for a state.
        """
        self._kv_cache, self.form = kv_cache, form
        self.block_axis, self.split = kv_cache.block_axis, kv_cache.split
        elements = kv_cache.elements_of(kv_cache.arrays)
        sizes = [array.nbytes // array.shape[1] * self.split for array in elements]
        if form.nbytes > sum(sizes):
            raise ValueError(
                f"a block of {sum(sizes)} bytes has no room for a state of {form.nbytes} bytes"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._num_used = sum(start < form.nbytes for start in starts)
        self.numbers = [form.numbers(*span) for span in zip(starts, sizes, strict=True)]
        self.numbers = self.numbers[: self._num_used]

    @property
    def arrays(self) -> list[mx.array]:
        """All of K and V."""
        return self._kv_cache.arrays

    @property
    def used(self) -> list[mx.array]:
        """The arrays whose blocks hold states."""
        return self._used(self.arrays)

    def _used(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return list(self._kv_cache.elements_of(arrays)[: self._num_used])

    def settle(self) -> None:
        """Has K and V that wait to be written in the arrays."""
        self._kv_cache.settle()

    def read(self, arrays: Sequence[mx.array], blocks: mx.array) -> list[mx.array]:
        """[n, *shape] parts of [n] blocks; `arrays` stand for the storage's."""
        found, split = [], self.split
        if split > 1:
            blocks = (blocks[:, None] * split + mx.arange(split, dtype=blocks.dtype)).flatten()
        for array in self._used(arrays):
            taken = mx.take(array.view(_BITS[array.dtype.size]), blocks, axis=1)
            heads, num_rows, *row = taken.shape
            rows = taken.reshape(heads, num_rows // split, split * math.prod(row))
            found.append(rows.swapaxes(0, 1).flatten(1))
        return self.form.from_bits(found[0] if len(found) == 1 else mx.concatenate(found, axis=1))

    def write(self, blocks_np: np.ndarray, parts: Sequence[mx.array]) -> None:
        """Puts [n, *shape] parts into [n] blocks, none of them twice, in place."""
        rows = mx.array(self._kv_cache.rows_of_blocks(blocks_np))
        used, start = self.used, 0
        bits = self.form.to_bits(parts, used[0].dtype.size)
        for array in used:
            heads, _, *row = array.shape
            per_block = heads * self.split * math.prod(row)
            content = bits[:, start : start + per_block]
            content = mx.pad(content, [(0, 0), (0, per_block - content.shape[1])])
            content = content.reshape(len(blocks_np), heads, self.split, *row)
            array[:, rows] = content.swapaxes(0, 1).flatten(1, 2).view(array.dtype)
            start += per_block


class RecurrentState(LayerState):
    """By MLX's operations: states are written when the next step begins, as scattered K/V are."""

    pipelined = False
    rolls_back = True
    traceable = True

    def __init__(self, blocks: StateBlocks | SharedBlocks) -> None:
        """
        Args:
            blocks: where the states lie.
        """
        self._blocks = blocks
        self._pending: list[Written[RecurrentPlan]] = []  # of each, the states its plan ends with
        self._last_rows_np: np.ndarray | None = None
        self._inputs: list[mx.array] | None = None  # stand for the arrays while a forward is traced

    @property
    def arrays(self) -> list[mx.array]:
        """None where the memory is that of K and V, whose storage looks after it."""
        return self._blocks.arrays if isinstance(self._blocks, StateBlocks) else []

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        if isinstance(self._blocks, StateBlocks):
            self._blocks.arrays = list(arrays)

    @property
    def block_axis(self) -> int:  # type: ignore[override]
        """See LayerState."""
        return self._blocks.block_axis

    @property
    def split(self) -> int:  # type: ignore[override]
        """See LayerState."""
        return self._blocks.split

    @property
    def page_arrays(self) -> list[mx.array]:
        return self._blocks.used

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        return self._blocks.numbers

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
            self._blocks.write(blocks_np, [_joined(parts) for parts in zip(*states, strict=True)])

    def settle(self) -> None:
        mx.synchronize()  # reads in flight hold the arrays' buffers
        self._blocks.settle()
        self.begin_step()
        mx.eval(self._blocks.arrays)

    def restore(self, last_rows_np: np.ndarray) -> None:
        self._last_rows_np = last_rows_np

    @property
    def inputs(self) -> list[mx.array]:
        return self._blocks.arrays

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        pending, self._pending = self._pending, []
        self._inputs = list(inputs)
        try:
            yield
        finally:
            self._pending, self._inputs = pending, None

    @property
    def outputs(self) -> list[Written[RecurrentPlan]]:
        return list(self._pending)

    @outputs.setter
    def outputs(self, outputs: Sequence[Written[RecurrentPlan]]) -> None:
        self._pending += outputs

    def run(
        self,
        plan: RecurrentPlan,
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
        arrays = self._blocks.arrays if self._inputs is None else self._inputs
        states = self._blocks.read(arrays, plan.before)
        if plan.fresh is not None:
            states = [_zero_where(plan.fresh, part) for part in states]
        results: list[list[mx.array]] = []
        ended: list[list[mx.array]] = []
        for run in plan.runs:
            of_run = states if run.requests is None else [part[run.requests] for part in states]
            found, after = compute(run.rows, of_run)
            dtypes = self._blocks.form.dtypes
            after = [part.astype(dtype) for part, dtype in zip(after, dtypes, strict=True)]
            results.append([result.flatten(0, 1)[:, None] for result in found])
            ended.append(after if run.kept is None else [part[run.kept] for part in after])
            if run.requests is None:
                states = after
            else:
                states = [
                    _put(part, run.requests, new) for part, new in zip(states, after, strict=True)
                ]
        self._pending.append(Written(plan, [_joined(parts) for parts in zip(*ended, strict=True)]))
        joined = [_joined(parts) for parts in zip(*results, strict=True)]
        return joined if plan.places is None else [result[plan.places] for result in joined]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))


def _zero_where(fresh: mx.array, part: mx.array) -> mx.array:
    return mx.where(fresh.reshape(-1, *[1] * (part.ndim - 1)), mx.zeros((), part.dtype), part)


def _put(part: mx.array, requests: mx.array, new: mx.array) -> mx.array:
    """A copy of [R, ...] with [n, ...] in the place of some."""
    copied = mx.contiguous(part)  # another array: this one may be wanted as it is
    copied[requests] = new
    return copied
