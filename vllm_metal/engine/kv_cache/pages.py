# SPDX-License-Identifier: Apache-2.0
"""Exports and imports blocks of the pool as pages: bytes that other threads can read and write.

A page holds a block's content for all layers of one KV cache group: for each layer, a part of each
array of its storage. Its bytes are a row of uint8, part after part. Only the engine's thread
accesses the pool; other threads serialize copies of blocks to rows, or fill rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import check_blocks
from vllm_metal.engine.kv_cache.layer_state import Fenced, LayerState

#: Dtypes that are exported as integers: Python's memoryview does not support bfloat16.
_CARRIERS = {mx.bfloat16: mx.uint16}
#: Elements of a fence.
_FENCE_SIZE = 8
#: Smallest unsigned bit pattern that is inf or NaN, by dtype; all larger ones are, too.
#: In a pool uint8 is fp8 e4m3, which has no infinity. int8 is always finite.
_NOT_FINITE = {mx.float32: 0x7F800000, mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.uint8: 0x7F}


@dataclass(frozen=True)
class PagePart:
    """One array's part of a page."""

    shape: tuple[int, ...]  # of one block: the array's, without the axis of blocks
    dtype: mx.Dtype  # of the array
    nbytes: int
    #: Consecutive (dtype, bytes) segments if the numbers are not of `dtype`; the rest is padding.
    numbers: tuple[tuple[mx.Dtype, int], ...] = ()
    #: The array's shape up to and including the axis of blocks; empty for parts outside a pool.
    outer: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def inner(self) -> tuple[int, ...]:
        """The array's shape after the axis of blocks, with a block's parts first if it is split."""
        return self.shape[len(self.outer) - 1 :]

    @property
    def spans(self) -> tuple[tuple[mx.Dtype, int], ...]:
        """Consecutive (dtype, bytes) segments, padding included."""
        if not self.numbers:
            return ((self.dtype, self.nbytes),)
        rest = self.nbytes - sum(nbytes for _, nbytes in self.numbers)
        return (*self.numbers, (mx.int8, rest)) if rest else self.numbers

    @property
    def carrier(self) -> mx.Dtype:
        """Dtype of the array's exported copies: its own, or uint16 for bfloat16."""
        return _CARRIERS.get(self.dtype, self.dtype)


class BlockPages:
    """Exports and imports whole blocks of a pool, in order with the steps.

    Exported pages are arrays, one per part: [n, *shape], row-contiguous, in the pool's dtype but
    for bfloat16, which is exported as uint16. `page_rows` makes rows of them; imports take rows.

    Drop the object together with the pool. No method keeps an array of the pool beyond its call.
    """

    def __init__(
        self, layer_states: Mapping[str, LayerState], groups: Sequence[Sequence[str]]
    ) -> None:
        """
        Args:
            layer_states: storage by layer name, of all networks.
            groups: layer names of each KV cache group, in the order of a page's parts.
        """
        self._states = [[layer_states[name] for name in names] for names in groups]
        self._all_states = list(dict.fromkeys(layer_states.values()))
        storages = (dict.fromkeys(state.storage for state in states) for states in self._states)
        self._fenced = [[each for each in group if isinstance(each, Fenced)] for group in storages]
        self._parts = [
            tuple(part for state in states for part in _parts_of(state)) for states in self._states
        ]
        self._num_blocks = min(part.outer[-1] for parts in self._parts for part in parts)
        self._page_bytes = [sum(part.nbytes for part in parts) for parts in self._parts]

    def parts(self, group: int) -> tuple[PagePart, ...]:
        """Returns the parts of a page of the group, in order."""
        return self._parts[group]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a page, by KV cache group."""
        return tuple(self._page_bytes)

    def page_bytes(self, group: int) -> int:
        """Returns the bytes of a page of the group."""
        return self._page_bytes[group]

    def queue_export(self, group: int, blocks_np: np.ndarray) -> list[mx.array]:
        """Copies blocks lazily, without waiting for the device.

        Called when a step's forward is built, before that step is submitted. The copies hold the
        blocks as previous steps left them. This step must not write to these blocks: with pipelined
        storage the copies run after its writes. All later writes run after the copies.

        Submit all returned arrays together with the step; after that, other threads may read them.
        If the storage is not pipelined, do not evaluate writes to the pool before the step has
        ended, as for the step's other reads: MLX copies a pool that is written while a read of it
        is queued.

        Raises ValueError: one of the blocks ([n] integers, n at least 1) is out of range.
        """
        check_blocks("blocks_np", blocks_np, self._num_blocks)
        fenced = self._fenced[group]
        fences = [fence for storage in fenced for fence in storage.fences]
        copies = list(self._copies(group, blocks_np, fences))
        if fenced:
            after = _fence_of(copies)
            for storage in fenced:
                storage.write_after(after)
            # So the fence is computed with the copies, or it would keep them until a layer writes.
            copies[-1:] = mx.depends(copies[-1:], [after])
        return copies

    def export(self, group: int, blocks_np: np.ndarray) -> list[mx.array]:
        """Copies blocks between steps; waits for the device. See `queue_export`.

        Returns evaluated arrays, which other threads may read while steps run.
        """
        check_blocks("blocks_np", blocks_np, self._num_blocks)
        for state in self._states[group]:
            state.wait_for_device()
        copies = list(self._copies(group, blocks_np))
        mx.eval(copies)
        return copies

    def import_pages(self, group: int, blocks_np: np.ndarray, rows: np.ndarray) -> None:
        """Writes pages into blocks between steps; waits for the device.

        Args:
            blocks_np: [n] distinct integers.
            rows: [n or more, page_bytes] uint8, C-contiguous; the first n are written. May be
                reused after the call.

        Raises:
            ValueError: the dtype or shape of `rows` is wrong, or a block is out of range.
        """
        check_blocks("blocks_np", blocks_np, self._num_blocks)
        count, parts, states = len(blocks_np), self._parts[group], self._states[group]
        if rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(f"rows: expected contiguous uint8, found {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] != self._page_bytes[group] or len(rows) < count:
            expected = (count, self._page_bytes[group])
            raise ValueError(f"rows: expected {expected}, or more rows, found {rows.shape}")
        # Deferred writes of another group, for a request that has ended, may hit these blocks.
        for state in self._all_states:
            state.begin_step()
        for state in states:
            state.wait_for_device()
        arrays = (array for state in states for array in state.page_arrays)
        # Views of the same memory, in dtypes that numpy supports.
        views = [array.view(part.carrier) for array, part in zip(arrays, parts, strict=True)]
        mx.eval(views)
        start = 0
        for view, part in zip(views, parts, strict=True):
            _write(view, part, blocks_np, rows[:count, start : start + part.nbytes])
            start += part.nbytes

    def _copies(
        self, group: int, blocks_np: np.ndarray, fences: Sequence[mx.array] = ()
    ) -> Iterator[mx.array]:
        """Yields lazy copies: one gather per array, with indices computed from the fences.

        MLX's encoder orders dispatches by the buffers they bind, so the fences must be inputs of
        the computation. `mx.depends` would not order it, as it dispatches nothing.
        """
        nothing = mx.stack(list(fences)).min() * 0 if fences else None
        rows: dict[tuple[int, ...], mx.array] = {}  # by `PagePart.outer`
        for part in self._parts[group]:
            if part.outer not in rows:
                indices = mx.array(_rows(blocks_np, part.outer))
                rows[part.outer] = indices if nothing is None else indices + nothing
        arrays = (array for state in self._states[group] for array in state.page_arrays)
        for part, array in zip(self._parts[group], arrays, strict=True):
            flat = array.reshape(math.prod(part.outer), *part.inner)  # the outer axes as one
            copy = mx.take(flat, rows[part.outer], 0)
            yield copy if part.carrier == part.dtype else copy.view(part.carrier)


def _parts_of(state: LayerState) -> Iterator[PagePart]:
    axis, split = state.storage.block_axis, state.storage.split
    for array, numbers in zip(state.page_arrays, state.page_numbers, strict=True):
        lead, num_rows, inner = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
        shape = (*lead, split, *inner) if split > 1 else (*lead, *inner)
        nbytes = math.prod(shape) * array.dtype.size
        yield PagePart(shape, array.dtype, nbytes, numbers, (*lead, num_rows // split))


def _rows(blocks_np: np.ndarray, outer: tuple[int, ...]) -> np.ndarray:
    """Returns [n, *outer[:-1]] uint32, each block's indices in an array of [prod(outer), ...]."""
    *lead, num_blocks = outer
    starts = np.arange(math.prod(lead)).reshape(lead) * num_blocks
    return (blocks_np.reshape(-1, *[1] * len(lead)) + starts).astype(np.uint32)


def _write(array: mx.array, part: PagePart, blocks_np: np.ndarray, columns: np.ndarray) -> None:
    """Writes [n, bytes of the part] uint8 into blocks of an array, in place, on the host."""
    # The device shares the memory and has no read of it queued. On a CPU this is ten times as fast
    # as MLX's scatter, which copies single elements. The numpy view must not outlive the call:
    # while it exists, a scatter copies the pool.
    pool_np = np.asarray(array).reshape(*part.outer, *part.inner)
    pool_np = np.moveaxis(pool_np, len(part.outer) - 1, 0)
    parts_np = columns.view(pool_np.dtype).reshape(-1, *pool_np.shape[1:])
    for block, part_np in zip(blocks_np.tolist(), parts_np, strict=True):
        pool_np[block] = part_np  # block by block, numpy copies contiguous memory


def _fence_of(copies: Sequence[mx.array]) -> mx.array:
    """Returns a fence, [8] uint32, computed from elements of all copies."""
    firsts = [mx.as_strided(copy, (_FENCE_SIZE,), (1,), 0) for copy in copies]
    return mx.stack(firsts).max(0).astype(mx.uint32)


def page_rows(
    arrays: Sequence[mx.array | memoryview],
    start: int = 0,
    stop: int | None = None,
    memory: np.ndarray | None = None,
) -> np.ndarray:
    """Copies pages into rows of bytes; waits for arrays that the device still computes.

    Any thread may call it for arrays that are evaluated or submitted. Keeps no references to them.

    Args:
        arrays: pages from `BlockPages`, or views of their memory.
        start: the first page.
        stop: the page after the last; None: all.
        memory: [n or more, page_bytes] uint8 to write to. None allocates, which costs a page fault
            per system page.

    Returns:
        [n, page_bytes] uint8, C-contiguous.
    """
    parts = [_bytes_of(array)[start:stop] for array in arrays]
    rows = None if memory is None else memory[: len(parts[0])]
    return np.concatenate(parts, axis=1, out=rows)


def _bytes_of(array: mx.array | memoryview) -> np.ndarray:
    """Returns a view of an array [n, ...] as [n, bytes of an element] uint8."""
    return np.asarray(memoryview(array).cast("B")).reshape(len(array), -1)  # type: ignore[arg-type]


def finite_rows(parts: Sequence[PagePart], rows: np.ndarray) -> np.ndarray:
    """Returns [n] bool, whether each page has only finite numbers.

    Args:
        parts: a page's parts; uint8 is fp8 e4m3, other integers are always finite.
        rows: [n, bytes of the parts] uint8.
    """
    # Merges consecutive parts of a dtype: each check costs 10 µs.
    spans: dict[mx.Dtype, list[np.ndarray]] = {}
    start = 0
    numbers = (span for part in parts for span in part.spans)
    for dtype, of_dtype in groupby(numbers, lambda span: span[0]):
        stop = start + sum(nbytes for _, nbytes in of_dtype)
        if dtype in _NOT_FINITE:
            spans.setdefault(dtype, []).append(rows[:, start:stop])
        start = stop
    finite = np.ones(len(rows), bool)
    for dtype, columns in spans.items():
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        finite &= _finite(joined, dtype)
    return finite


def _finite(columns: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Returns [n] bool, whether all numbers in rows of `columns`, [n, bytes] uint8, are finite.

    Compares the largest bit patterns, without temporary arrays: viewed as unsigned for negative
    numbers, as signed for positive ones.
    """
    least, sign = _NOT_FINITE[dtype], 1 << 8 * dtype.size - 1
    signed, unsigned = columns.view(f"i{dtype.size}"), columns.view(f"u{dtype.size}")
    return (signed.max(axis=1) < least) & (unsigned.max(axis=1) < sign + least)
