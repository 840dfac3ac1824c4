# SPDX-License-Identifier: Apache-2.0
"""Groups a step's sequences for MLX's operations, and finds where their states end.

The host must know all numbers. Each sequence is padded: kept rows to apply, padding up to the most
rows that could have been kept, the step's own rows, padding again. So steps of the same shape
differ only in the plan's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels.sequences import (
    FIRST_KEPT,
    FIRST_ROW,
    KEEP_AT,
    NUM_CERTAIN,
    NUM_KEPT,
    NUM_ROWS,
    POSITION,
    WRITE,
)

#: Sequences up to this length share a group: decode and verification.
SHORT = 16
#: Rows per pass through a state. At this length, work that is quadratic in it costs as much as all
#: other work.
CHUNK = 32
#: From this ratio of rows to heads, a convolution reads whole slices of rows.
_FEW_HEADS = 8
#: Default maximum of inputs per row of a convolution.
NUM_TAPS = 8


@dataclass(frozen=True)
class Endings:
    """The E states to store after a chunk, and the rows that each includes."""

    length: int  # D, the chunk's first rows: no state ends after more
    sequences: mx.array | None  # [E] int32, index in the group; None: each sequence once, in order
    #: [E, D] bool, rows up to the end of each state; None: all D
    applied: mx.array | None


@dataclass(frozen=True)
class Chunk:
    """A range of a group's rows through which its states are advanced in one call."""

    start: int  # index in the group's L rows
    stop: int
    endings: Endings | None


@dataclass(frozen=True)
class Group:
    """n sequences that are computed together, padded to L rows."""

    size: int  # n
    length: int  # L
    #: [n * L] int32, indices in the step's rows and then the kept rows; None: the step's, in order
    rows: mx.array | None
    #: [n * Q] int32, indices in the step's rows of the last Q of each sequence's L rows. Rows
    #: before these are kept ones, which have no outputs. None: the step's, in order.
    outputs: mx.array | None
    live: mx.array | None  # [n, L] bool, rows that change the state; None: all
    sequences: mx.array | None  # [n] int32, indices in the N; None: all, in order
    fresh: mx.array | None  # [n] bool, sequences whose state starts as zero; None: none
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ReferencePlan:
    """Plan of a step with N sequences and T rows for MLX's operations."""

    num_rows: int  # T
    num_kept: int  # rows to keep for the next step
    groups: tuple[Group, ...]
    order: mx.array | None  # [T] int32, index of each row in the groups' rows; None: in order
    keep: mx.array  # [num_kept] int32, indices in the step's rows
    uses_kept: bool  # whether kept rows may be applied
    num_kept_before: int  # P', rows kept by the previous step; 0: none
    #: [T, num_taps] int32, inputs of a convolution, oldest first, as indices in: the step's rows,
    #: previously kept rows, a zero, the inputs of the N states (the newest of each, then the second
    #: newest of each, ...)
    taps: mx.array
    #: [F] int32, the rows of `taps`: those near a sequence's first, whose inputs are not just the
    #: rows before them; None: all rows
    heads: mx.array | None
    end_taps: mx.array  # [E, num_taps] int32, the newest inputs after each end, oldest first
    #: [E] int32, block of each end state in the ops' order; never 0
    ends_blocks_np: np.ndarray = field(compare=False)


def plan(
    table_np: np.ndarray,
    blocks_np: np.ndarray,
    block_size: int,
    num_rows: int,
    num_kept: int,
    num_kept_before: int,
    bounds_np: np.ndarray,
    num_taps: int = NUM_TAPS,
) -> ReferencePlan:
    """Plans a step of recurrent layers in MLX's operations.

    Kept rows are those of drafts of the previous step. A sequence first applies the accepted ones
    to its state; the host must know how many these are.

    Args:
        table_np: [N, COLUMNS] int32, `Sequences.table`.
        blocks_np: [N, W] int32, `Sequences.blocks`.
        num_rows: T, of this step.
        num_kept: rows to keep for the next step, at least 1.
        num_kept_before: rows kept by the previous step.
        bounds_np: [N] int, upper bound of the kept rows that each sequence applies.
        num_taps: largest number of taps of a convolution.
    """
    step = _Step(table_np, bounds_np, num_rows, num_kept_before)
    ends = _Ends.find(step, blocks_np, block_size)
    groups, order, index_np = [], [], np.zeros(num_rows, np.int32)
    placed = 0
    for members in _members(step):
        group, in_group, outputs_np = _group(step, ends, members)
        groups.append(group)
        order.append(in_group)
        own = np.flatnonzero(outputs_np >= 0)
        index_np[outputs_np[own]] = placed + own
        placed += outputs_np.size
    order_np = np.concatenate(order)
    taps_np = _taps(step, ends.sequences_np[order_np], ends.applied_np[order_np], num_taps)
    heads_np = _heads(step, num_taps)
    in_order = placed == num_rows and np.array_equal(index_np, np.arange(num_rows))
    return ReferencePlan(
        num_rows,
        num_kept,
        tuple(groups),
        None if in_order else mx.array(index_np),
        mx.array(_keep(step, num_kept)),
        bool(step.bounds_np.any()),
        num_kept_before,
        mx.array(taps_np[:num_rows] if heads_np is None else taps_np[heads_np]),
        None if heads_np is None else mx.array(heads_np),
        mx.array(taps_np[num_rows:]),
        ends.blocks_np[order_np].astype(np.int32),
    )


class _Step:
    """The requests of a step, read from the step's table; rows are numbered as in `Group.rows`."""

    def __init__(
        self, table_np: np.ndarray, bounds_np: np.ndarray, num_rows: int, num_kept_before: int
    ) -> None:
        self.table_np = table_np.astype(np.int64)
        self.bounds_np = bounds_np.astype(np.int64)
        self.num_rows, self.num_kept_before = num_rows, num_kept_before
        self.kept_np = self.table_np[:, NUM_KEPT]
        self.counts_np = self.table_np[:, NUM_ROWS]
        self.first_rows_np = self.table_np[:, FIRST_ROW]
        self.first_kept_np = num_rows + self.table_np[:, FIRST_KEPT]
        self.lengths_np = self.bounds_np + self.counts_np

    def padded(self, members: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns [n, L] row indices, padded; and masks of the step's rows and of kept rows."""
        at = np.arange(length)
        first_rows, first_kept = self.first_rows_np[members], self.first_kept_np[members]
        own_index = at - self.bounds_np[members, None]
        own = (own_index >= 0) & (own_index < self.counts_np[members, None])
        kept = at < self.kept_np[members, None]
        # Padding repeats a row of the same sequence, so that a NaN of another one cannot get in.
        padding = np.where(self.bounds_np[members] > 0, first_kept, 0)
        padding = np.where(self.counts_np[members] > 0, first_rows, padding)
        rows = np.where(own, first_rows[:, None] + own_index, padding[:, None])
        return np.where(kept, first_kept[:, None] + at, rows), own, kept


@dataclass(frozen=True)
class _Ends:
    """States to store: first each sequence's last state, if it writes one, then full blocks'."""

    sequences_np: np.ndarray  # [E]
    blocks_np: np.ndarray  # [E]
    applied_np: np.ndarray  # [E], rows applied by its sequence, including kept ones
    padded_np: np.ndarray  # [E], padded rows that this takes
    most_np: np.ndarray  # [E], maximum of padded rows in a step of this shape
    full_np: np.ndarray  # [E] bool

    @staticmethod
    def find(step: _Step, blocks_np: np.ndarray, block_size: int) -> _Ends:
        write_np, positions_np = step.table_np[:, WRITE], step.table_np[:, POSITION]
        totals_np = step.kept_np + step.table_np[:, NUM_CERTAIN]
        last = np.flatnonzero(write_np)
        first_np, stop_np = positions_np // block_size, (positions_np + totals_np) // block_size
        num_full_np = stop_np - first_np
        owner, number = _expand(num_full_np)
        columns = first_np[owner] + number
        full_blocks = blocks_np[owner, columns]
        # If a sequence's last state goes to the same block, the last one wins.
        wanted = (full_blocks != 0) & (full_blocks != write_np[owner])
        owner, columns, full_blocks = owner[wanted], columns[wanted], full_blocks[wanted]
        sequences = np.concatenate([last, owner])
        applied = np.concatenate(
            [totals_np[last], (columns + 1) * block_size - positions_np[owner]]
        )
        full = np.arange(len(sequences)) >= len(last)
        missing = step.bounds_np[sequences] - step.kept_np[sequences]
        within_kept = applied < step.kept_np[sequences]
        padded = applied + np.where(within_kept, 0, missing)
        blocks = np.concatenate([write_np[last], full_blocks])
        most = (step.bounds_np + step.table_np[:, NUM_CERTAIN])[sequences]
        return _Ends(sequences, blocks, applied, padded, most, full)


def _members(step: _Step) -> list[np.ndarray]:
    """Groups sequences: all short ones, then those with equal numbers of chunks."""
    lengths_np = step.lengths_np
    num_chunks = np.where(lengths_np <= SHORT, 0, -(-lengths_np // CHUNK))
    return [np.flatnonzero(num_chunks == number) for number in np.unique(num_chunks)]


def _group(step: _Step, ends: _Ends, members: np.ndarray) -> tuple[Group, np.ndarray, np.ndarray]:
    """Returns a group, indices of its states to store, and [n * Q] output rows, -1 for none."""
    lengths_np = step.lengths_np[members]
    length = max(int(lengths_np.max()), 1)
    rows_np, own_np, kept_np = step.padded(members, length)
    can_be_dead = step.bounds_np[members].any() or (lengths_np < length).any()
    in_order = np.array_equal(rows_np.ravel(), np.arange(step.num_rows))
    plain = in_order and not can_be_dead
    fresh_np = step.table_np[members, POSITION] == 0
    chunks, order = _chunks(ends, members, length)
    skipped = min(int(step.bounds_np[members].min()), length - 1) if len(chunks) == 1 else 0
    outputs_np = np.where(own_np, rows_np, -1)[:, skipped:].ravel()
    group = Group(
        len(members),
        length,
        None if plain else mx.array(rows_np.ravel().astype(np.int32)),
        None if plain else mx.array(np.maximum(outputs_np, 0).astype(np.int32)),
        mx.array(own_np | kept_np) if can_be_dead else None,
        None if len(members) == len(step.table_np) else mx.array(members.astype(np.int32)),
        mx.array(fresh_np) if fresh_np.any() else None,
        chunks,
    )
    return group, order, outputs_np


def _chunks(ends: _Ends, members: np.ndarray, length: int) -> tuple[tuple[Chunk, ...], np.ndarray]:
    """Returns a group's chunks, and indices of its states to store, in the chunks' order."""
    ours = np.flatnonzero(np.isin(ends.sequences_np, members))
    padded = ends.padded_np[ours]
    found, order = [], []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        # A sequence that applies nothing ends before the first row.
        here = ours[(padded <= stop) & ((padded > start) | (start == 0))]
        found.append(Chunk(start, stop, _endings(ends, members, here, start, stop)))
        order.append(here)
    return tuple(found), np.concatenate(order)


def _endings(
    ends: _Ends, members: np.ndarray, here: np.ndarray, start: int, stop: int
) -> Endings | None:
    if not len(here):
        return None
    sequences_np = np.searchsorted(members, ends.sequences_np[here])
    in_order = np.array_equal(sequences_np, np.arange(len(members)))
    padded = ends.padded_np[here]
    # Only drafts and padding follow.
    length = min(max(int(ends.most_np[here].max()), 1), stop) - start
    # A full block's position changes from step to step, so it must not change the plan's shape.
    to_the_end = not ends.full_np[here].any() and (padded == start + length).all()
    applied_np = np.arange(start, start + length) < padded[:, None]
    return Endings(
        length,
        None if in_order else mx.array(sequences_np.astype(np.int32)),
        None if to_the_end else mx.array(applied_np),
    )


def _expand(numbers_np: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ragged items: returns the owner and the index within the owner, [sum] each."""
    owner = np.repeat(np.arange(len(numbers_np)), numbers_np)
    return owner, np.arange(len(owner)) - (np.cumsum(numbers_np) - numbers_np)[owner]


def _keep(step: _Step, num_kept: int) -> np.ndarray:
    """Returns the rows of drafts, which the step keeps, [num_kept] int32."""
    certain_np = step.table_np[:, NUM_CERTAIN]
    owner, number = _expand(step.counts_np - certain_np)
    keep_np = np.zeros(num_kept, np.int32)
    rows_np = (step.first_rows_np + certain_np)[owner] + number
    keep_np[step.table_np[owner, KEEP_AT] + number] = rows_np
    return keep_np


def _heads(step: _Step, num_taps: int) -> np.ndarray | None:
    """Returns rows with fewer than num_taps - 1 rows of their sequence before them, [F] int32."""
    owner, number = _expand(step.counts_np)
    heads = np.flatnonzero(number < num_taps - 1)
    # Too many for separate work: None stands for all rows.
    if len(heads) * _FEW_HEADS > step.num_rows:
        return None
    return (step.first_rows_np[owner] + number)[heads].astype(np.int32)


def _taps(step: _Step, ends_np: np.ndarray, applied_np: np.ndarray, num_taps: int) -> np.ndarray:
    """Returns [T + E, num_taps] int32: newest inputs at each row and stored state, oldest first.

    ends_np: [E], sequence of each state. applied_np: [E], rows applied to it.
    """
    owner, number = _expand(step.counts_np)
    rows_np = step.first_rows_np[owner] + number
    sequences = np.concatenate([np.zeros(step.num_rows, np.int64), ends_np])
    applied = np.concatenate([np.zeros(step.num_rows, np.int64), applied_np])
    sequences[rows_np], applied[rows_np] = owner, step.kept_np[owner] + number + 1
    sequences, at = sequences[:, None], applied[:, None] - np.arange(num_taps, 0, -1)
    zero = step.num_rows + step.num_kept_before
    before = zero + 1 + (-1 - at) * len(step.counts_np) + sequences
    before = np.where(step.table_np[sequences, POSITION] == 0, zero, before)
    own_index = at - step.kept_np[sequences]
    kept = step.first_kept_np[sequences] + at
    rows = np.where(own_index < 0, kept, step.first_rows_np[sequences] + own_index)
    return np.where(at < 0, before, rows).astype(np.int32)
