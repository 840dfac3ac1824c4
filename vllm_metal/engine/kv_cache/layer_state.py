# SPDX-License-Identifier: Apache-2.0
"""A layer's KV or recurrent state between steps, and its block table during a step.

A `LayerState` is stored in a `Storage`: arrays with a part for every block of the pool. Optional
interfaces are `Traceable`, `Fenced` and `Restorable`. A `StepScope` holds what layers share during
one step. `StatefulLayer` (stateful_layer.py) describes the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag, RaggedLayout
from metal_kernels.op_common import padded
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionPlan

#: A step's plan for one kind of layer, made from the step's layout.
PlanT = TypeVar("PlanT")
_NO_STEP = "a paged cache was used outside a step"


class Run(NamedTuple):
    """Consecutive tokens of one request with bidirectional attention, such as those of an image."""

    first: int  # index of the first token in the step
    end: int  # index after the last
    begin: int  # position in the request where the run begins; earlier tokens may be cached
    windowed: bool = False  # bidirectional only in layers with a sliding window, and within it


@dataclass(frozen=True)
class StepLayout(RaggedLayout):
    """A step's layout for one KV cache group: block tables, slots, and each request's drafts."""

    req_indices_np: np.ndarray | None = None  # [R] int32; None: no later step continues this one
    num_drafts_np: np.ndarray | None = None  # [R] int32, drafts at a request's end; None: no drafts
    pace: Pace | None = None  # of the network, for all its groups; None: MLX ends command buffers
    # If set, the lengths are upper bounds, and only the device knows the slots.
    lag: PositionLag | None = None
    slot_mapping: mx.array | None = None  # [T] int32
    group: int = 0  # whose block tables these are
    #: For a forward that is submitted together with earlier ones of the same requests and number of
    #: tokens: [E] int32, slots of the earlier forwards' tokens, newest last, -1 padding first. E is
    #: the same in all of them.
    earlier_slots_np: np.ndarray | None = None
    runs: tuple[Run, ...] = ()

    @cached_property
    def attention(self) -> dict[Hashable, AttentionPlan]:
        """Attention planned for all these tokens so far, see `share_attention`.

        Not a field, so that no changed copy has it.
        """
        return {}

    def share_attention(self, planned: dict[Hashable, AttentionPlan]) -> None:
        """Makes `attention` that of another network's layout of the same tokens."""
        vars(self)["attention"] = planned

    @cached_property
    def padded_slots(self) -> mx.array:
        """[max(T, 8)] int32, the slot mapping padded with -1.

        MLX gives kernels another signature for smaller arrays.
        """
        slots = self.slot_mapping
        return padded(mx.array(self.slot_mapping_np) if slots is None else slots, fill=-1)

    def rows_of(self, requests: np.ndarray) -> np.ndarray:
        """Returns [t] int32, indices of the selected requests' tokens; `requests`: [R] bool."""
        lens = np.diff(self.query_start_loc_np)
        return np.flatnonzero(np.repeat(requests, lens)).astype(np.int32)

    def arrays_without(self, requests: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns query_start_loc, seq_lens and block tables of requests that are not selected."""
        lens = np.diff(self.query_start_loc_np)[~requests]
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return starts, self.seq_lens_np[~requests], self.block_tables_np[~requests]

    def cut_at(self, tokens: np.ndarray) -> StepLayout:
        """Returns the layout with requests split before `tokens`, indices in the step.

        A part is a request of its own, whose context ends at its last token.
        """
        edges = np.unique(np.concatenate([self.query_start_loc_np, tokens]))
        owner = np.searchsorted(self.query_start_loc_np, edges[:-1], side="right") - 1
        later = self.query_start_loc_np[owner + 1] - edges[1:]  # tokens of the request after it
        return replace(
            self,
            query_start_loc_np=edges.astype(np.int32),
            seq_lens_np=(self.seq_lens_np[owner] - later).astype(np.int32),
            block_tables_np=self.block_tables_np[owner],
            req_indices_np=None if self.req_indices_np is None else self.req_indices_np[owner],
            num_drafts_np=None,
            lag=None if self.lag is None else self.lag.of(owner),
            runs=(),
        )

    def split(self, parts: int) -> StepLayout:
        """Returns the layout for a pool whose blocks are each split into `parts`."""
        if parts == 1:
            return self
        tables_np = self.block_tables_np[:, :, None] * parts + np.arange(parts, dtype=np.int32)
        block_size = self.block_size // parts
        width = -(-int(self.seq_lens_np.max()) // block_size)
        tables_np = tables_np.reshape(len(tables_np), -1)[:, :width]
        return replace(self, block_tables_np=tables_np, block_size=block_size)


class Pending(NamedTuple, Generic[PlanT]):
    """Arrays that one layer of a forward leaves for the next step."""

    plan: PlanT  # of that forward
    arrays: list[mx.array]


class StepScope(Generic[PlanT]):
    """The current step's positions and plan, for layers of one kind in one KV cache group.

    PagedLayers sets it; the layers' caches read it while the model's forward is built.
    """

    def __init__(self, plan: Callable[[StepLayout], PlanT]) -> None:
        """`plan` makes a step's plan from its layout, once per step."""
        self._plan_of = plan
        self._step: tuple[mx.array, PlanT] | None = None
        self._padded: mx.array | None = None

    def plan_of(self, layout: StepLayout) -> PlanT:
        return self._plan_of(layout)

    @contextmanager
    def during(self, positions: mx.array, plan: PlanT) -> Iterator[None]:
        """Context manager that sets the current step; outside of it, `positions` and `plan` raise.

        `positions` is [T] int32, the position of each token in its request.
        """
        step, self._step, self._padded = self._step, (positions, plan), None
        try:
            yield
        finally:
            self._step, self._padded = step, None

    @property
    def positions(self) -> mx.array:
        """Positions of the step's tokens, [T] int32; raises RuntimeError outside of a step."""
        if self._step is None:
            raise RuntimeError(_NO_STEP)
        return self._step[0]

    @property
    def padded_positions(self) -> mx.array:
        """[max(T, 8)] int32, `positions` padded with zeros, cached per step.

        MLX gives kernels another signature for smaller arrays.
        """
        if self._padded is None:
            self._padded = padded(self.positions, fill=0)
        return self._padded

    @property
    def plan(self) -> PlanT:
        """The step's plan.

        Raises RuntimeError: no step has begun, or it has ended.
        """
        if self._step is None:
            raise RuntimeError(_NO_STEP)
        return self._step[1]


class LayerState(ABC):
    """State of one layer, or of one layer of each KV cache group, for all blocks of the pool.

    Groups can share a storage because a block belongs to one group at a time. Subclasses also
    implement those of `Traceable`, `Fenced` and `Restorable` that they need.
    """

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """The storage that holds the state, possibly together with other states."""

    @property
    def page_arrays(self) -> list[mx.array]:
        """Arrays whose blocks hold the layer's whole state (pages.py)."""
        return self.storage.arrays

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        """For each page array, a block's consecutive (dtype, bytes) segments; empty if the whole
        block has the array's dtype."""
        return [()] * len(self.page_arrays)

    def begin_step(self) -> None:
        """Applies writes that the previous step deferred.

        Called before the first write of every forward of every network, and before whole blocks are
        copied. Does nothing if there are no deferred writes.
        """
        return

    @abstractmethod
    def wait_for_device(self) -> None:
        """Waits until all writes are in the arrays and no queued operation reads them.

        Called between steps: after a step was submitted, before the next one's first write. MLX can
        then write the arrays in place, without a copy of the pool.
        """


class Storage(LayerState):
    """Arrays with a part for every block of the pool."""

    #: Whether a step may be submitted while the previous one still runs.
    pipelined: bool
    #: Axis of blocks, or of their parts, in `arrays`.
    block_axis: int = 0
    #: Number of consecutive parts of a block on that axis.
    split: int = 1

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays; may be set to others of the same shapes and dtypes."""

    @arrays.setter
    @abstractmethod
    def arrays(self, arrays: Sequence[mx.array]) -> None: ...

    @property
    def storage(self) -> Storage:
        return self

    def copy_blocks(self, sources_np: np.ndarray, targets_np: np.ndarray) -> None:
        """Copies whole blocks, between steps.

        Args:
            sources_np: [n] int32.
            targets_np: [n] int32, distinct, and none of them a source.
        """
        self.wait_for_device()
        sources = mx.array(self.rows_of_blocks(sources_np))
        copied = [mx.take(array, sources, self.block_axis) for array in self.arrays]
        mx.eval(copied)  # MLX copies the whole pool if a read of it is queued
        self._put(self.rows_of_blocks(targets_np), copied)

    def clear_blocks(self, blocks_np: np.ndarray) -> None:
        """Sets [n] int32 blocks to zero, between steps."""
        rows_np = self.rows_of_blocks(blocks_np)
        self._put(rows_np, [mx.zeros((), array.dtype) for array in self.arrays])

    def rows_of_blocks(self, blocks_np: np.ndarray) -> np.ndarray:
        """Returns [n * split] int32, indices of the parts of [n] blocks on the axis of blocks."""
        if self.split == 1:
            return blocks_np
        parts_np = np.arange(self.split, dtype=np.int32)
        return (blocks_np[:, None].astype(np.int32) * self.split + parts_np).ravel()

    def _put(self, rows_np: np.ndarray, contents: Sequence[mx.array]) -> None:
        """Writes in place; contents are [..., n, ...], or scalars."""
        where = (slice(None),) * self.block_axis + (mx.array(rows_np),)
        for array, content in zip(self.arrays, contents, strict=True):
            array[where] = content


class Traceable(ABC):
    """A state that supports compiled forwards (models/compiled.py)."""

    @property
    def traceable(self) -> bool:
        """Whether a forward can be traced now."""
        return True

    @property
    @abstractmethod
    def inputs(self) -> list[mx.array]:
        """Arrays of this state that a forward reads."""

    @abstractmethod
    def traced(self, inputs: Sequence[mx.array]) -> AbstractContextManager[None]:
        """Traces a forward that reads placeholders for `inputs`; restores the state afterwards."""

    @property
    @abstractmethod
    def outputs(self) -> list[Pending[Any]]:
        """Deferred writes or fences that the last forward leaves for the next step, in layer order.

        May be set to the outputs of a compiled forward.
        """

    @outputs.setter
    @abstractmethod
    def outputs(self, outputs: Sequence[Pending[Any]]) -> None: ...


class Fenced(ABC):
    """A storage whose reads and writes are ordered by fences, not by MLX."""

    @property
    @abstractmethod
    def fences(self) -> Sequence[mx.array]:
        """Arrays that a queued read of the storage must depend on."""

    @abstractmethod
    def write_after(self, fence: mx.array) -> None:
        """Orders the next write after a queued read that depends on `fences`.

        `fence` is [8] uint32, computed from the read's result.
        """


class Restorable(ABC):
    """A state that must be rolled back after rejected drafts."""

    @abstractmethod
    def restore(self, last_rows_np: np.ndarray) -> None:
        """Rolls the state back to the last accepted tokens, [R] int32 indices in the newest step.

        Called when that step's tokens are known, before the next `begin_step`.
        """


def joined(parts: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Concatenates `parts`; returns a single part unchanged."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis)
