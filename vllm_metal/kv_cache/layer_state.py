# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps between steps: its storage, and the layers' part of a step.

A `LayerState` is the storage: arrays in which every block of the pool has a place. A `StepScope`
holds what layers share of one step. `StatefulLayer` (stateful_layer.py) describes the layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx
import numpy as np

from metal_kernels.layout import Behind, RaggedLayout
from metal_kernels.pace import Pace

#: What a kind of layer makes of a step's layout, for its storage.
PlanT = TypeVar("PlanT")
_NO_STEP = "a paged cache was used outside a step"


@dataclass(frozen=True)
class StepLayout(RaggedLayout):
    """The same of one KV cache group, and what layers may want to know of its requests."""

    req_indices_np: np.ndarray | None = None  # [R] int32; None: the requests are in no table
    num_drafts_np: np.ndarray | None = None  # [R] int32, rows at a request's end; None: no drafts
    pace: Pace | None = None  # of the network, for all its groups; None: MLX ends command buffers
    # Where this is there, the lengths are upper bounds, and only the device knows the slots.
    behind: Behind | None = None
    slot_mapping: mx.array | None = None  # [T] int32

    def split(self, parts: int) -> StepLayout:
        """The same of a pool whose blocks are each cut into so many."""
        if parts == 1:
            return self
        tables_np = self.block_tables_np[:, :, None] * parts + np.arange(parts, dtype=np.int32)
        block_size = self.block_size // parts
        width = -(-int(self.seq_lens_np.max()) // block_size)
        tables_np = tables_np.reshape(len(tables_np), -1)[:, :width]
        return replace(self, block_tables_np=tables_np, block_size=block_size)

    @property
    def positions_np(self) -> np.ndarray:
        """[T] int32, position of each row in its request."""
        ends = self.query_start_loc_np[1:]
        shifts = np.repeat(self.seq_lens_np - ends, np.diff(self.query_start_loc_np))
        return np.arange(len(shifts), dtype=np.int32) + shifts.astype(np.int32)


@dataclass(frozen=True)
class Pending(Generic[PlanT]):
    """What one layer of a forward leaves for the next step."""

    plan: PlanT  # that it was made by
    arrays: list[mx.array]


class StepScope(Generic[PlanT]):
    """What the layers of one kind in one KV cache group share of the step at hand.

    PagedLayers begins and ends it; the layers' caches read it while the model's forward is built.
    """

    def __init__(self, plan: Callable[[StepLayout], PlanT]) -> None:
        """`plan` is called once a step."""
        self._plan_of = plan
        self._step: tuple[mx.array, PlanT] | None = None

    def begin(self, positions: mx.array, layout: StepLayout) -> None:
        """
        Args:
            positions: [T] int32, position of each row in its request.
            layout: of the group.
        """
        self._step = positions, self._plan_of(layout)

    @contextmanager
    def traced(self, positions: mx.array, plan: PlanT) -> Iterator[None]:
        """Within, these stand for the step's own: a forward is traced."""
        step, self._step = self._step, (positions, plan)
        try:
            yield
        finally:
            self._step = step

    def end(self) -> None:
        """The forward is built: no layer has a step until the next `begin`."""
        self._step = None

    @property
    def positions(self) -> mx.array:
        """[T] int32; raises as `plan` does."""
        if self._step is None:
            raise RuntimeError(_NO_STEP)
        return self._step[0]

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
    """What one layer keeps, or one layer of each KV cache group, for every block of the pool.

    Groups share a storage soundly: a block belongs to one group at a time.
    """

    #: Whether a step may be handed to the device while the one before still runs.
    pipelined: bool
    #: Whether `restore` has anything to do.
    rolls_back: ClassVar[bool] = False
    #: Axis of `arrays` that counts blocks, or their parts.
    block_axis: int = 0
    #: Of how many parts a block consists, one after another on that axis.
    split: int = 1
    #: Whether MLX sees no order of writes and reads, and fences make it.
    fenced: bool = False

    @property
    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All that the storage holds, as it stands. May be set to other arrays of the same kind."""

    @arrays.setter
    @abstractmethod
    def arrays(self, arrays: Sequence[mx.array]) -> None: ...

    @property
    def memory(self) -> LayerState:
        """The storage that this one lies in, which orders the writes and reads of both."""
        return self

    @property
    def page_arrays(self) -> list[mx.array]:
        """Those whose blocks hold all that the storage keeps (pages.py)."""
        return self.arrays

    @property
    def page_numbers(self) -> list[tuple[tuple[mx.Dtype, int], ...]]:
        """Of each of them what a block's bytes are numbers of; empty: of the array's dtype."""
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

    @property
    def traceable(self) -> bool:
        """Whether a forward over the storage can be traced: it has the four members that follow."""
        return False

    @property
    def inputs(self) -> list[mx.array]:
        """What a forward reads of the storage."""
        return self.arrays

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        """Within, a forward is traced: it reads these as `inputs`, and leaves nothing behind.

        Args:
            inputs: stand for `inputs`, in their order and of their shapes.
        """
        raise NotImplementedError(f"forwards over {type(self).__name__} cannot be traced")
        yield

    @property
    def outputs(self) -> list[Pending[Any]]:
        """What the forward built last left, in an order that depends on nothing but the model."""
        raise NotImplementedError(f"forwards over {type(self).__name__} cannot be traced")

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[Any]]) -> None:
        """Of a forward that was traced before, and computed again."""
        raise NotImplementedError(f"forwards over {type(self).__name__} cannot be traced")

    @property
    def fences(self) -> Sequence[mx.array]:
        """Arrays that a queued read of `arrays` must be computed from, where they are `fenced`."""
        return ()

    def write_after(self, fence: mx.array) -> None:
        """Has the next write come after a queued read.

        Args:
            fence: [8] uint32, computed from what was read, which in turn came after `fences`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no fences")

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

    def rows_of_blocks(self, blocks_np: np.ndarray) -> np.ndarray:
        """[n * split] int32, where the parts of [n] blocks are on the axis of blocks."""
        if self.split == 1:
            return blocks_np
        parts_np = np.arange(self.split, dtype=np.int32)
        return (blocks_np[:, None].astype(np.int32) * self.split + parts_np).ravel()

    def clear_blocks(self, blocks_np: np.ndarray) -> None:
        """Sets [n] int32 blocks to zero, between steps."""
        rows_np = self.rows_of_blocks(blocks_np)
        self._put(rows_np, [mx.zeros((), array.dtype) for array in self.arrays])

    def restore(self, last_rows_np: np.ndarray) -> None:
        """Takes the state back to the last accepted token, where drafts after it were rejected.

        Called once the newest step's tokens are known, before the next `begin_step`, and only where
        the storage `rolls_back`.

        Args:
            last_rows_np: [R] int32, of each request of that step the row of its last token that was
                accepted.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no state of rejected drafts")

    def _put(self, rows_np: np.ndarray, contents: Sequence[mx.array]) -> None:
        """Writes in place; [..., n, ...] contents, or one value for all."""
        where = (slice(None),) * self.block_axis + (mx.array(rows_np),)
        for array, content in zip(self.arrays, contents, strict=True):
            array[where] = content
