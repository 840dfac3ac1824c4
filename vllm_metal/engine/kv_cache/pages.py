# SPDX-License-Identifier: Apache-2.0
"""Whole blocks of the pool as pages: bytes that threads may write to files and read from them.

A page is all that the layers of one KV cache group keep of a block: for each layer, each array of
its storage has a part. As bytes it is a row of uint8, the parts one after another. Only the
engine's thread touches the pool; other threads make rows of copies of blocks, or fill rows.
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

#: Arrays of these dtypes come as integers: Python's memoryviews know no bfloat16.
_CARRIERS = {mx.bfloat16: mx.uint16}
#: Elements of a fence that are taken of a copied array: as many as a fence has.
_FENCE_SIZE = 8
#: Smallest unsigned bit pattern that is inf or NaN, by dtype; all larger ones are, too.
#: In a pool uint8 is fp8 e4m3, which has no infinity; int8, which is not here, is always finite.
_NOT_FINITE = {mx.float32: 0x7F800000, mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.uint8: 0x7F}


@dataclass(frozen=True)
class PagePart:
    """One array's share of a page."""

    shape: tuple[int, ...]  # of one block: the array's, without the axis that counts blocks
    dtype: mx.Dtype  # of the array
    nbytes: int
    #: What the bytes are numbers of, one after another, where they are not of `dtype`: bytes of
    #: each dtype. Bytes after the last are nothing.
    numbers: tuple[tuple[mx.Dtype, int], ...] = ()
    #: The array's shape up to its blocks, of those that lie in the pool.
    outer: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def inner(self) -> tuple[int, ...]:
        """The array's shape behind its blocks, a block's parts first where it has several."""
        return self.shape[len(self.outer) - 1 :]

    @property
    def spans(self) -> tuple[tuple[mx.Dtype, int], ...]:
        """Bytes of each dtype, one after another."""
        if not self.numbers:
            return ((self.dtype, self.nbytes),)
        rest = self.nbytes - sum(nbytes for _, nbytes in self.numbers)
        return (*self.numbers, (mx.int8, rest)) if rest else self.numbers

    @property
    def carrier(self) -> mx.Dtype:
        """Dtype of the arrays that hold such parts."""
        return _CARRIERS.get(self.dtype, self.dtype)


class BlockPages:
    """Whole blocks in and out of a pool, ordered with the steps.

    Pages leave in arrays, one for each of `parts`: [n, *shape], row-contiguous, in the pool's dtype
    but for bfloat16, which comes as uint16. `page_rows` makes rows of them. Pages come as rows.

    To be let go with the pool. No method keeps an array of the pool beyond its call.
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
        """What a page of the group consists of, in order."""
        return self._parts[group]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a page, by KV cache group."""
        return tuple(self._page_bytes)

    def page_bytes(self, group: int) -> int:
        """Bytes of a page of the group."""
        return self._page_bytes[group]

    def queue_export(self, group: int, blocks_np: np.ndarray) -> list[mx.array]:
        """Copies of whole blocks, not computed yet; does not wait for the device.

        Called when a step's forward is built, and before that step is handed to the device. The
        copies hold what the steps before have left in the blocks. This step must not write to them:
        where layers are pipelined, the copies come after its writes. All later writes come after
        the copies.

        Args:
            group: KV cache group.
            blocks_np: [n] integers, n at least 1.

        Raises:
            ValueError: a block is not the pool's; MLX would read elsewhere.

        Returns:
            Arrays that are handed to the device all together, along with the step. Other threads
            may read them after that. Where layers are not pipelined, the step must be over before
            anything that writes to the pool is evaluated, as is the rule for its other reads: MLX
            copies a pool that is written while a read of it is queued.
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
        """Copies of whole blocks, between steps; waits for the device.

        Args:
            group: KV cache group.
            blocks_np: [n] integers, n at least 1.

        Raises:
            ValueError: a block is not the pool's.

        Returns:
            Evaluated arrays, that other threads may read while steps go on.
        """
        check_blocks("blocks_np", blocks_np, self._num_blocks)
        for state in self._states[group]:
            state.wait_for_device()
        copies = list(self._copies(group, blocks_np))
        mx.eval(copies)
        return copies

    def import_pages(self, group: int, blocks_np: np.ndarray, rows: np.ndarray) -> None:
        """Puts pages into whole blocks, between steps; waits for the device.

        Args:
            group: KV cache group.
            blocks_np: [n] integers, where the pages go; none twice.
            rows: [n or more, page_bytes] uint8, C-contiguous; the first n go into the blocks. Free
                for other use afterwards.

        Raises:
            ValueError: the rows are not the group's pages, or fewer; or a block is not the pool's.
        """
        check_blocks("blocks_np", blocks_np, self._num_blocks)
        count, parts, states = len(blocks_np), self._parts[group], self._states[group]
        if rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise ValueError(f"rows: expected contiguous uint8, found {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] != self._page_bytes[group] or len(rows) < count:
            expected = (count, self._page_bytes[group])
            raise ValueError(f"rows: expected {expected}, or more rows, found {rows.shape}")
        # What an ended request left for later may go into the same memory, by another group.
        for state in self._all_states:
            state.begin_step()
        for state in states:
            state.wait_for_device()
        arrays = (array for state in states for array in state.page_arrays)
        # Views of the same memory, under dtypes that numpy has.
        views = [array.view(part.carrier) for array, part in zip(arrays, parts, strict=True)]
        mx.eval(views)
        start = 0
        for view, part in zip(views, parts, strict=True):
            _write(view, part, blocks_np, rows[:count, start : start + part.nbytes])
            start += part.nbytes

    def _copies(
        self, group: int, blocks_np: np.ndarray, fences: Sequence[mx.array] = ()
    ) -> Iterator[mx.array]:
        """Lazy; one gather an array, whose indices are computed from the fences.

        An index is an input of the gather that a kernel's fence went into: MLX's encoder orders
        dispatches by the buffers they bind, so `mx.depends`, which dispatches nothing, would not.
        """
        nothing = mx.stack(list(fences)).min() * 0 if fences else None
        rows: dict[tuple[int, ...], mx.array] = {}  # by an array's shape up to its blocks
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
    """Yields the state's parts of a page, found out once: a step's export reads every array."""
    axis, split = state.storage.block_axis, state.storage.split
    for array, numbers in zip(state.page_arrays, state.page_numbers, strict=True):
        lead, num_rows, inner = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
        shape = (*lead, split, *inner) if split > 1 else (*lead, *inner)
        nbytes = math.prod(shape) * array.dtype.size
        yield PagePart(shape, array.dtype, nbytes, numbers, (*lead, num_rows // split))


def _rows(blocks_np: np.ndarray, outer: tuple[int, ...]) -> np.ndarray:
    """[n, *outer[:-1]] uint32, each block's rows in an array of [prod(outer), ...]; blocks last."""
    *lead, num_blocks = outer
    starts = np.arange(math.prod(lead)).reshape(lead) * num_blocks
    return (blocks_np.reshape(-1, *[1] * len(lead)) + starts).astype(np.uint32)


def _write(array: mx.array, part: PagePart, blocks_np: np.ndarray, columns: np.ndarray) -> None:
    """Writes parts of pages into the blocks of an array, in place, by the host.

    The device reads the same memory, and has nothing queued that does. MLX's scatter takes element
    by element on a CPU, a tenth as fast. The view of the pool ends here: while it is held, the next
    scatter would copy the pool.

    Args:
        array: of a dtype that numpy has.
        part: its share of a page.
        columns: [n, bytes of the part] uint8.
    """
    pool_np = np.asarray(array).reshape(*part.outer, *part.inner)
    pool_np = np.moveaxis(pool_np, len(part.outer) - 1, 0)
    parts_np = columns.view(pool_np.dtype).reshape(-1, *pool_np.shape[1:])
    for block, part_np in zip(blocks_np.tolist(), parts_np, strict=True):
        pool_np[block] = part_np  # block by block numpy moves runs of memory, not elements


def _fence_of(copies: Sequence[mx.array]) -> mx.array:
    """A fence, [8] uint32, that comes after all the copies: computed from elements of each."""
    firsts = [mx.as_strided(copy, (_FENCE_SIZE,), (1,), 0) for copy in copies]
    return mx.stack(firsts).max(0).astype(mx.uint32)


def page_rows(
    arrays: Sequence[mx.array | memoryview],
    start: int = 0,
    stop: int | None = None,
    memory: np.ndarray | None = None,
) -> np.ndarray:
    """The bytes of pages, copied; waits for arrays that are with the device.

    Any thread may call it for arrays that are evaluated or were handed to the device. It keeps
    nothing of them.

    Args:
        arrays: of a `BlockPages`, or views of their memory.
        start: the first page.
        stop: the page after the last; None: all.
        memory: [n or more, page_bytes] uint8, where the rows go; None: new memory, of which every
            system page that is touched costs a fault.

    Returns:
        [n, page_bytes] uint8, C-contiguous: of each page the parts one after another.
    """
    parts = [_bytes_of(array)[start:stop] for array in arrays]
    rows = None if memory is None else memory[: len(parts[0])]
    return np.concatenate(parts, axis=1, out=rows)


def _bytes_of(array: mx.array | memoryview) -> np.ndarray:
    """[n, bytes of the part] uint8, in place."""
    return np.asarray(memoryview(array).cast("B")).reshape(len(array), -1)  # type: ignore[arg-type]


def finite_rows(parts: Sequence[PagePart], rows: np.ndarray) -> np.ndarray:
    """Tells of each page whether there is no NaN and no infinity among its numbers.

    Args:
        parts: of a page; uint8 counts as codes of fp8 e4m3, integers of other dtypes as finite.
        rows: [n, bytes of the parts] uint8.

    Returns:
        [n] bool.
    """
    spans: dict[mx.Dtype, list[np.ndarray]] = {}  # of consecutive parts; a look at each costs 10 µs
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
    """`finite_rows` for numbers of one floating dtype.

    Compares the largest bit pattern, with no array in between: viewed as unsigned for negative
    numbers, as signed for positive ones.
    """
    least, sign = _NOT_FINITE[dtype], 1 << 8 * dtype.size - 1
    signed, unsigned = columns.view(f"i{dtype.size}"), columns.view(f"u{dtype.size}")
    return (signed.max(axis=1) < least) & (unsigned.max(axis=1) < sign + least)
