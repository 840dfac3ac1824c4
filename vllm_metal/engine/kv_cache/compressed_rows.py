# SPDX-License-Identifier: Apache-2.0
"""Plans where layers with compressed entries (DeepSeek V4, V4.1) write and read rows of the pool.

An entry of a group of positions takes the slots of the group's last positions, in a layer of its
own: so it lies in the block that ends with the group or behind it, whatever a block's size. Texts
that share the blocks before may differ in the last positions, and in the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np

from metal_kernels.layout import stable
from metal_kernels.paged_attention.buckets import MAX_GATHERED
from metal_kernels.paged_attention.padded_rows import PaddedQueries
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import PlanT, StepLayout
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT
from vllm_metal.patches.mlx_patches.seam import Compression

#: Most tokens of a request that attend together; each such call reads the window before them again.
MAX_TOKENS = 128
#: Entries are padded to so many at least, so that short contexts have the same shapes for long.
_MIN_ENTRIES = 16


@dataclass(frozen=True)
class Call:
    """n pieces of requests, padded to Q tokens each, that attend together."""

    num_pieces: int  # n
    num_tokens: int  # Q
    rows: mx.array  # [n * Q] int32, indices of the tokens in the step
    #: [n, k] int32, slots of the newest positions, or of all entries, several each.
    read_slots: mx.array


@dataclass(frozen=True)
class CompressedRows:
    """What the layers of one kind read in a step; each kind has one of the two parts."""

    calls: tuple[Call, ...] = ()
    order: mx.array | None = None  # [T] int32, index of each token in the calls' padded tokens
    groups: mx.array | None = None  # [E, g] int32, slots of the rows of groups
    firsts: mx.array | None = None  # [E] int32, first position of each group


class CompressedPlan(Protocol):
    """A plan of writes with the reads of such layers."""

    @property
    def compressed(self) -> CompressedRows | None: ...


class _Requests:
    """First positions and pool slots of a layout's requests.

    They are computed on the device, which alone may know them, but for deferred writes.
    """

    def __init__(
        self, layout: StepLayout, defers_writes: bool, deferred_np: np.ndarray | None = None
    ) -> None:
        """
        Args:
            defers_writes: whether the pool holds a step's rows only after the step.
            deferred_np: slots of these rows, for reads.
        """
        assert layout.lag is None or not defers_writes
        self._xp: Any = np if defers_writes else mx
        self._tables, self._block_size = self.array(layout.block_tables_np), layout.block_size
        self.num_tokens = self.array(np.diff(layout.query_start_loc_np).astype(np.int32))
        self.starts = self.array(layout.seq_lens_np.astype(np.int32)) - self.num_tokens
        if layout.lag is not None:
            self.starts = self.starts - layout.lag.counts
        self.ends = self.starts + self.num_tokens
        self._deferred = None
        if defers_writes and deferred_np is not None:
            order = np.argsort(deferred_np).astype(np.int32)
            self._deferred = deferred_np[order], order

    def array(self, values: np.ndarray) -> Any:
        return values if self._xp is np else mx.array(values)

    def where(self, are_there: Any, values: Any, other: int) -> Any:
        """Returns int32 values, `other` where they are not there."""
        found = self._xp.where(are_there, values, other)
        return found.astype(mx.int32 if self._xp is mx else np.int32)

    def slots(self, owners_np: np.ndarray, positions: Any) -> Any:
        """Returns the slots of [n, k] positions of n requests; of any others, some slot."""
        last = self._tables.shape[1] - 1
        columns = self._xp.clip(positions // self._block_size, 0, last)
        blocks = self._tables[self.array(owners_np)[:, None], columns]
        return blocks * self._block_size + positions % self._block_size

    def read_slots(self, owners_np: np.ndarray, positions: Any, are_there: Any) -> mx.array:
        """Returns the slots to read for [n, k] positions of n requests; see `read_slots_of`."""
        read_slots = self.slots(owners_np, positions)
        if self._deferred is not None:
            known, rows = self._deferred
            nearest = np.minimum(np.searchsorted(known, read_slots), len(known) - 1)
            read_slots = np.where(
                known[nearest] == read_slots, ABSENT - 1 - rows[nearest], read_slots
            )
        found = self.where(are_there, read_slots, ABSENT)
        return found if isinstance(found, mx.array) else mx.array(found)


class _Groups(NamedTuple):
    """The groups that may end in a step: at most one more than its tokens fill."""

    owners_np: np.ndarray  # [E] requests
    firsts: Any  # [E] first positions

    @staticmethod
    def of(layout: StepLayout, requests: _Requests, size: int) -> _Groups:
        counts_np = -(-np.diff(layout.query_start_loc_np) // size)
        owners_np = np.repeat(np.arange(len(counts_np)), counts_np)
        numbers_np = np.arange(len(owners_np)) - (np.cumsum(counts_np) - counts_np)[owners_np]
        first = requests.starts[requests.array(owners_np)] // size
        return _Groups(owners_np, (first + requests.array(numbers_np.astype(np.int32))) * size)


def plan_of_groups(
    layout: StepLayout, by: Compression, heads: int, backend: KVBackend[PlanT]
) -> PlanT:
    """Plans the write of rows of which entries are computed, and reads of groups."""
    plan = backend.plan_of_writes(layout, heads)
    requests = _Requests(layout, backend.defers_writes, layout.slot_mapping_np)
    owners_np, firsts = _Groups.of(layout, requests, by.size)
    before = by.size if by.overlap else 0
    offsets = requests.array(np.arange(-before, by.size, dtype=np.int32))
    positions = firsts[:, None] + offsets
    ends = requests.ends[requests.array(owners_np)][:, None]
    read_slots = requests.read_slots(owners_np, positions, (positions >= 0) & (positions < ends))
    found = CompressedRows(groups=read_slots, firsts=mx.array(firsts))
    return replace(cast(Any, plan), compressed=found)


def plan_of_entries(
    layout: StepLayout, by: Compression, num_slots: int, backend: KVBackend[PlanT]
) -> PlanT:
    """Plans the write of entries of `num_slots` slots each, and reads of those of contexts."""
    requests = _Requests(layout, backend.defers_writes)
    owners_np, firsts = _Groups.of(layout, requests, by.size)
    offsets = requests.array(np.arange(by.size - num_slots, by.size, dtype=np.int32))
    slots = requests.slots(owners_np, firsts[:, None] + offsets)
    ended = firsts + by.size <= requests.ends[requests.array(owners_np)]
    slots = requests.where(ended[:, None], slots, -1).reshape(-1)
    if isinstance(slots, mx.array):
        writes = replace(layout, slot_mapping_np=np.zeros(slots.size, np.int32), slot_mapping=slots)
    else:
        writes = replace(layout, slot_mapping_np=slots)
    plan = backend.plan_of_writes(writes, 1)

    def read_slots(pieces: _Requests, members: np.ndarray, lens_np: np.ndarray) -> mx.array:
        count = max(stable(max(int(lens_np.max()) // by.size, 1)), _MIN_ENTRIES)
        firsts = pieces.array(np.arange(count, dtype=np.int32) * by.size)
        positions = (firsts[:, None] + offsets).reshape(1, -1)
        last = positions // by.size * by.size + by.size
        ends = pieces.ends[pieces.array(members)][:, None]
        return pieces.read_slots(members, positions, last <= ends)

    cut = _cut(layout)
    pieces = _Requests(cut, backend.defers_writes, writes.slot_mapping_np)
    return replace(cast(Any, plan), compressed=_calls(cut, by, partial(read_slots, pieces)))


def plan_of_keys(
    layout: StepLayout, by: Compression, heads: int, backend: KVBackend[PlanT]
) -> PlanT:
    """Plans the write of keys, and reads of the newest positions of each token."""
    plan = backend.plan_of_writes(layout, heads)

    def read_slots(pieces: _Requests, members: np.ndarray, lens_np: np.ndarray) -> mx.array:
        indices = pieces.array(members)
        count = by.window + int(num_tokens_np[members].max()) - 1
        offsets = pieces.array(np.arange(count, dtype=np.int32))
        positions = pieces.starts[indices][:, None] - (by.window - 1) + offsets
        ends = pieces.ends[indices][:, None]
        return pieces.read_slots(members, positions, (positions >= 0) & (positions < ends))

    cut = _cut(layout)
    num_tokens_np = np.diff(cut.query_start_loc_np)
    pieces = _Requests(cut, backend.defers_writes, layout.slot_mapping_np)
    return replace(cast(Any, plan), compressed=_calls(cut, by, partial(read_slots, pieces)))


def _cut(layout: StepLayout) -> StepLayout:
    """Splits requests into pieces of at most MAX_TOKENS tokens."""
    starts, ends = layout.query_start_loc_np[:-1], layout.query_start_loc_np[1:]
    if (ends - starts).max() <= MAX_TOKENS:
        return layout
    cuts = [np.arange(a, b, MAX_TOKENS) for a, b in zip(starts, ends, strict=True) if b > a]
    return layout.cut_at(np.concatenate(cuts).astype(np.int32))


def _calls(
    cut: StepLayout, by: Compression, read_slots: Callable[[np.ndarray, np.ndarray], mx.array]
) -> CompressedRows:
    """Groups pieces of requests into calls; the groups are the same for all layers.

    `read_slots` maps indices of pieces and the lengths of their contexts to the [n, k] slots that
    they read, or to [1, k] if all read the same.
    """
    starts_np, num_tokens_np = cut.query_start_loc_np, np.diff(cut.query_start_loc_np)
    positions_np = np.zeros(int(starts_np[-1]), np.int32)
    calls: list[Call] = []
    size = 0
    for members in _similar(num_tokens_np, cut.seq_lens_np // by.smallest):
        queries = PaddedQueries.padded(starts_np[members], num_tokens_np[members])
        positions_np[queries.rows[queries.real]] = size + np.flatnonzero(queries.real)
        size += queries.rows.size
        found = read_slots(members, cut.seq_lens_np[members])
        found = mx.broadcast_to(found, (len(members), found.shape[1]))
        rows = mx.array(queries.rows.ravel().astype(np.int32))
        num_pieces, num_tokens = queries.rows.shape
        calls.append(Call(num_pieces, num_tokens, rows, found))
    in_order = size == len(positions_np) and bool((positions_np == np.arange(size)).all())
    return CompressedRows(tuple(calls), None if in_order else mx.array(positions_np))


def _similar(num_tokens_np: np.ndarray, entries_np: np.ndarray) -> Iterator[np.ndarray]:
    """Yields indices of pieces of similar shape, in groups that one padded call may hold.

    entries_np: most entries that any layer has of the pieces' contexts.
    """
    entries_np = np.maximum(entries_np, _MIN_ENTRIES)
    shapes = np.ceil(np.log2(num_tokens_np)) * 64 + np.ceil(np.log2(entries_np))
    for shape in np.unique(shapes):
        members = np.flatnonzero(shapes == shape)
        read = int(num_tokens_np[members].max()) + int(entries_np[members].max())
        most = max(MAX_GATHERED // read, 1)
        yield from np.split(members, range(most, len(members), most))
