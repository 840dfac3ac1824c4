# SPDX-License-Identifier: Apache-2.0
"""A layer's KV or recurrent state between steps, and its block table during a step.

A `LayerState` lies in a `Storage`: arrays in which every block of the pool has a place. What not
every kind of state can do, or needs, is a part of its own: `Traceable`, `Fenced`, `Restorable`. A
`StepScope` holds what layers share of one step. `StatefulLayer` (stateful_layer.py) describes the
layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag, RaggedLayout
from metal_kernels.op_common import padded
from metal_kernels.pace import Pace

#: What a kind of layer makes of a step's layout, for its storage.
PlanT = TypeVar("PlanT")
_NO_STEP = "a paged cache was used outside a step"


class Run(NamedTuple):
    """Rows of one request that see each other whatever their order, as those of an image may."""

    first: int  # row of the forward
    end: int  # the row behind the last
    begin: int  # place in the request where the run begins, before these rows if it was found there
    windowed: bool = False  # in layers with a window alone, and within it


@dataclass(frozen=True)
class StepLayout(RaggedLayout):
    """A step's layout for one KV cache group: block tables, slots, and each request's drafts."""

    req_indices_np: np.ndarray | None = None  # [R] int32; None: of a step that nobody goes on from
    num_drafts_np: np.ndarray | None = None  # [R] int32, rows at a request's end; None: no drafts
    pace: Pace | None = None  # of the network, for all its groups; None: MLX ends command buffers
    # Where this is there, the lengths are upper bounds, and only the device knows the slots.
    lag: PositionLag | None = None
    slot_mapping: mx.array | None = None  # [T] int32
    group: int = 0  # whose block tables these are
    #: Where this forward is one of several that are handed over together, each of the same requests
    #: in as many rows: [E] int32, slots of the rows of those before it, the newest last. There is
    #: room for those of all but one; what is not taken is -1, and comes first.
    earlier_slots_np: np.ndarray | None = None
    runs: tuple[Run, ...] = ()

    def rows_of(self, requests: np.ndarray) -> np.ndarray:
        """[t] int32, batch rows of [R] bool requests, in order."""
        lens = np.diff(self.query_start_loc_np)
        return np.flatnonzero(np.repeat(requests, lens)).astype(np.int32)

    def others_than(self, requests: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """query_start_loc, seq_lens and block tables of requests that are not among [R] bool."""
        lens = np.diff(self.query_start_loc_np)[~requests]
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return starts, self.seq_lens_np[~requests], self.block_tables_np[~requests]

    def split(self, parts: int) -> StepLayout:
        """Returns the layout over a pool whose blocks are each cut into so many."""
        if parts == 1:
            return self
        tables_np = self.block_tables_np[:, :, None] * parts + np.arange(parts, dtype=np.int32)
        block_size = self.block_size // parts
        width = -(-int(self.seq_lens_np.max()) // block_size)
        tables_np = tables_np.reshape(len(tables_np), -1)[:, :width]
        return replace(self, block_tables_np=tables_np, block_size=block_size)


@dataclass(frozen=True)
class Pending(Generic[PlanT]):
    """Arrays that one layer of a forward leaves for the next step."""

    plan: PlanT  # that they were made by
    arrays: list[mx.array]


class StepScope(Generic[PlanT]):
    """What the layers of one kind in one KV cache group share of the step at hand.

    PagedLayers sets it; the layers' caches read it while the model's forward is built.
    """

    def __init__(self, plan: Callable[[StepLayout], PlanT]) -> None:
        """`plan` is called once a step."""
        self._plan_of = plan
        self._step: tuple[mx.array, PlanT] | None = None
        self._padded: mx.array | None = None

    def plan_of(self, layout: StepLayout) -> PlanT:
        """What the layers need of a step that is laid out so in their group."""
        return self._plan_of(layout)

    @contextmanager
    def during(self, positions: mx.array, plan: PlanT) -> Iterator[None]:
        """Within, the step is at hand; outside, use raises.

        Args:
            positions: [T] int32, position of each row in its request.
            plan: of the step.
        """
        step, self._step, self._padded = self._step, (positions, plan), None
        try:
            yield
        finally:
            self._step, self._padded = step, None

    @property
    def positions(self) -> mx.array:
        """[T] int32; raises as `plan` does."""
        if self._step is None:
            raise RuntimeError(_NO_STEP)
        return self._step[0]

    @property
    def padded_positions(self) -> mx.array:
        """[max(T, 8)] int32, `positions` and zeros: of fewer elements kernels would be others.

        Made once a step.
        """
        if self._padded is None:
            self._padded = padded(self.positions, fill=0)
        return self._padded

    @property
    def plan(self) -> PlanT:
        """What was made of the layout.

        Raises:
            RuntimeError: no step has begun, or it has ended.
        """
        if self._step is None:
            raise RuntimeError(_NO_STEP)
        return self._step[1]


class LayerState(ABC):
    """What one layer, or one layer of each KV cache group, keeps for every block of the pool.

    Groups share a storage soundly: a block belongs to one group at a time. A kind of state
    implements this, and as much of `Traceable`, `Fenced` and `Restorable` as it needs.
    """

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """The arrays that the state lies in; others may lie there, too."""

    @property
    def page_arrays(self) -> list[mx.array]:
        """Arrays whose blocks hold all that the layer keeps (pages.py)."""
        return self.storage.arrays

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        """For each page array: the (dtype, bytes) segments of one block, one after another; empty
        if the whole block has the array's dtype."""
        return [()] * len(self.page_arrays)

    def begin_step(self) -> None:
        """Puts what the step before left for later into the arrays.

        Called before the first write of every forward of every network, and before whole blocks are
        moved; calls after the first have nothing to do until something is written again.
        """
        return

    @abstractmethod
    def wait_for_device(self) -> None:
        """Waits until all that was written is in the arrays and nothing queued reads them.

        Called between steps: after a step was handed to the device, before the next one's first
        write. MLX may then write the arrays in place, without a copy of the pool.
        """


class Storage(LayerState):
    """Arrays in which every block of the pool has a place."""

    #: Whether a step may be handed to the device while the one before still runs.
    pipelined: bool
    #: Axis of `arrays` that counts blocks, or their parts.
    block_axis: int = 0
    #: Number of parts that a block consists of, one after another on that axis.
    split: int = 1

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All that is kept, as it stands. May be set to other arrays of the same kind."""

    @arrays.setter
    @abstractmethod
    def arrays(self, arrays: Sequence[mx.array]) -> None: ...

    @property
    def storage(self) -> Storage:
        return self

    def copy_blocks(self, sources_np: np.ndarray, targets_np: np.ndarray) -> None:
        """Copies whole blocks, between steps.

        Args:
            sources_np: [n] int32, blocks to copy.
            targets_np: [n] int32, where each goes; none of them a source, none twice.
        """
        self.wait_for_device()
        sources = mx.array(self.rows_of_blocks(sources_np))
        copied = [mx.take(array, sources, self.block_axis) for array in self.arrays]
        mx.eval(copied)  # a queued read would have the whole pool copied
        self._put(self.rows_of_blocks(targets_np), copied)

    def clear_blocks(self, blocks_np: np.ndarray) -> None:
        """Sets [n] int32 blocks to zero, between steps."""
        rows_np = self.rows_of_blocks(blocks_np)
        self._put(rows_np, [mx.zeros((), array.dtype) for array in self.arrays])

    def rows_of_blocks(self, blocks_np: np.ndarray) -> np.ndarray:
        """[n * split] int32, where the parts of [n] blocks are on the axis of blocks."""
        if self.split == 1:
            return blocks_np
        parts_np = np.arange(self.split, dtype=np.int32)
        return (blocks_np[:, None].astype(np.int32) * self.split + parts_np).ravel()

    def _put(self, rows_np: np.ndarray, contents: Sequence[mx.array]) -> None:
        """Writes in place; [..., n, ...] contents, or one value for all."""
        where = (slice(None),) * self.block_axis + (mx.array(rows_np),)
        for array, content in zip(self.arrays, contents, strict=True):
            array[where] = content


class Traceable(ABC):
    """A state over which MLX can trace a forward (models/compiled.py)."""

    @property
    def traceable(self) -> bool:
        """Whether a forward over it can be traced as things are."""
        return True

    @property
    @abstractmethod
    def inputs(self) -> list[mx.array]:
        """Arrays that a forward reads of it."""

    @abstractmethod
    def traced(self, inputs: Sequence[mx.array]) -> AbstractContextManager[None]:
        """Within, a forward is traced: it reads these as `inputs`, and leaves nothing behind.

        Args:
            inputs: stand for `inputs`, in their order and of their shapes.
        """

    @property
    @abstractmethod
    def outputs(self) -> list[Pending[Any]]:
        """Arrays that the last forward leaves for the next step (rows to write, fences), in layer
        order. May be set to those of a forward that was traced before and computed again."""

    @outputs.setter
    @abstractmethod
    def outputs(self, outputs: Sequence[Pending[Any]]) -> None: ...


class Fenced(ABC):
    """A storage whose writes and reads MLX does not order: fences do."""

    @property
    @abstractmethod
    def fences(self) -> Sequence[mx.array]:
        """Arrays that a queued read of the storage must be computed from."""

    @abstractmethod
    def write_after(self, fence: mx.array) -> None:
        """Has the next write come after a queued read.

        Args:
            fence: [8] uint32, computed from what was read, which in turn came after `fences`.
        """


class Restorable(ABC):
    """A state that rejected drafts change."""

    @abstractmethod
    def restore(self, last_rows_np: np.ndarray) -> None:
        """Takes the state back to the last accepted token, where drafts after it were rejected.

        Called once the newest step's tokens are known, before the next `begin_step`.

        Args:
            last_rows_np: [R] int32, of each request of that step the row of its last token that was
                accepted.
        """


def joined(parts: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Parts one after another; a single one as it is."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis)
