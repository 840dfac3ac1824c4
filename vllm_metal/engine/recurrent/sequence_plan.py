# SPDX-License-Identifier: Apache-2.0
"""Splits a step's tokens into sequences whose states are read and written once, even with drafts.

vLLM gives a request one block for the state at its newest token. While it runs, that is the block
of the token; a full block keeps the state after its last token, and the next block of the request's
table has the newer ones ("align" of `--mamba-cache-mode`). A prefill chunk has no blocks between
its first and its last: these are block 0.

A step that verifies drafts stores the state after its last certain token in the block of its last
draft: that block still belongs to the request in the next step, however many drafts are accepted.
The drafts' inputs are kept rows, which the next step applies up to its own first token
(`PendingDrafts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from metal_kernels import sequence_groups, sequences
from metal_kernels.layout import stable
from metal_kernels.sequence_groups import ReferencePlan
from metal_kernels.sequences import Sequences
from vllm_metal.engine.kv_cache.layer_state import StepLayout, StepScope
from vllm_metal.engine.recurrent import long_prompts
from vllm_metal.engine.recurrent.long_prompts import LongPrompts
from vllm_metal.engine.recurrent.pending_drafts import NO_ENTRIES, Entries, PendingDrafts, lag_of

_numbers = count()  # numbers scopes
#: Minimum width of the block table.
_FEWEST_BLOCKS = 16


@dataclass(frozen=True)
class SequencePlan:
    """A step's sequences, and the blocks of their states, for one KV cache group."""

    scope: int  # number of the `SequenceScope` that created it
    sequences: Sequences
    applies: bool  # whether it reads rows kept by the previous step
    keeps: bool  # whether it keeps rows for the next step
    carried: mx.array | None  # [c] int32, rows of the previous step to keep once more
    #: Groups for MLX's operations; None if kernels compute.
    groups: ReferencePlan | None
    reads: mx.array | None  # [N] int32, blocks to read states from; None if kernels compute
    long: LongPrompts | None = None  # requests for MLX's chunked function


class SequenceScope(StepScope[SequencePlan]):
    """Shares a step's plan among the layers of one KV cache group, and tracks unapplied drafts."""

    def __init__(self, by_kernels: bool, num_taps: int, long_prompt: int | None = None) -> None:
        """
        Args:
            by_kernels: whether Metal kernels compute the layers; they read positions on the device.
            num_taps: largest kernel size of the layers' convolutions.
            long_prompt: fewest tokens of a prompt for MLX's chunked function; None: not used.
        """
        super().__init__(self._planned)
        self.number = next(_numbers)
        self.by_kernels, self.num_taps = by_kernels, num_taps
        self.long_prompt = long_prompt
        self._block_size = 0
        self.kept = PendingDrafts()

    def _planned(self, layout: StepLayout) -> SequencePlan:
        self._block_size = layout.block_size
        assert layout.req_indices_np is not None
        return self._step_of(layout, *self.kept.take(layout.req_indices_np))

    def flush_plan(self, req_indices_np: np.ndarray | None = None) -> SequencePlan | None:
        """Plans a step without tokens that applies accepted drafts; None if there are none.

        Includes requests whose accepted drafts the host knows, and only those in `req_indices_np`
        if given. Afterwards their states are stored like those of requests without drafts.
        """
        nothing, starts_np = np.zeros(0, np.int32), np.zeros(1, np.int32)
        _, found_np, flushed, carried = self.kept.take(nothing, req_indices_np)
        if not len(flushed):
            self.kept.add(carried, starts_np, self.kept.num_rows)
            return None
        layout = StepLayout(
            *(starts_np, nothing, np.zeros((0, 1), np.int32), nothing, self._block_size),
            req_indices_np=nothing,
        )
        return self._step_of(layout, NO_ENTRIES, found_np, flushed, carried)

    def _step_of(
        self,
        layout: StepLayout,
        entries: Entries,
        found_np: np.ndarray,
        flushed: Entries,
        carried: Entries,
    ) -> SequencePlan:
        step = _Step(layout, entries, found_np, flushed, carried)
        plan, left = step.planned(self, self.kept.num_rows)
        num_kept = plan.sequences.num_kept + step.num_carried if plan.keeps else 0
        self.kept.add(left, layout.query_start_loc_np, num_kept)
        return plan


class _Columns(NamedTuple):
    """[N] int32 each; upper bounds if only the device knows."""

    begins: np.ndarray  # position of the step's first token
    state_lens: np.ndarray  # number of tokens in the state
    last: np.ndarray  # a position in the block of the state
    first_kept: np.ndarray  # index of the first kept row
    most_kept: np.ndarray  # number of kept rows if all drafts were accepted


class _Step:
    """Computes a plan for R requests with tokens, then L requests that only apply kept rows."""

    def __init__(
        self,
        layout: StepLayout,
        entries: Entries,
        found_np: np.ndarray,
        flushed: Entries,
        carried: Entries,
    ) -> None:
        self.layout = layout
        self.size = layout.block_size
        self.carried = carried
        self.num_carried = int(carried.counts_np.sum())
        self.counts_np = np.diff(layout.query_start_loc_np)
        drafts_np = layout.num_drafts_np
        self.drafts_np = np.zeros_like(self.counts_np) if drafts_np is None else drafts_np
        self.begins_np = layout.seq_lens_np - self.counts_np
        exact = layout.lag is None and entries.lag is None
        has_np = found_np >= 0
        if exact and has_np.any():
            # The req_idx may have been reused, or its request may be further on by now: then the
            # state is in its usual block.
            gaps_np = self.begins_np[has_np] - entries.state_lens_np[found_np[has_np]]
            most_np = entries.counts_np[found_np[has_np]]
            has_np[has_np] = (gaps_np >= 0) & (gaps_np <= most_np)
        self.before = None
        if has_np.any():
            in_order = np.array_equal(found_np, np.arange(len(entries)))
            self.before = entries if in_order else entries.select(np.maximum(found_np, 0))
        self.has_np = has_np
        self.flushed = flushed
        self._lags = not (exact and flushed.lag is None)

    def _columns(self) -> _Columns:
        has, before, flushed = self.has_np, self.before, self.flushed
        begins, last, first = self.begins_np, self.begins_np - 1, np.zeros_like(self.begins_np)
        state_lens, most = begins, first
        if before is not None:
            state_lens = np.where(has, before.state_lens_np, begins)
            last = np.where(has, before.last_np, last)
            first = np.where(has, before.first_np, 0)
            most = np.where(has, before.counts_np, 0)
        if not len(flushed):
            return _Columns(begins, state_lens, last, first, most)
        pairs = (
            (begins, flushed.state_lens_np + flushed.accepted_np),
            (state_lens, flushed.state_lens_np),
            (last, flushed.last_np),
            (first, flushed.first_np),
            (most, flushed.counts_np),
        )
        return _Columns(*(np.concatenate(pair).astype(np.int32) for pair in pairs))

    def _tables(self) -> np.ndarray:
        """Returns [R, W] int32 block tables that reach to the blocks of the states."""
        tables_np = self.layout.block_tables_np
        # A state may be stored in the block of a rejected draft, beyond this step's table.
        if self.before is None or (width := tables_np.shape[1]) >= self.before.tables_np.shape[1]:
            return tables_np
        known_np = np.where(self.has_np[:, None], self.before.tables_np, 0)
        return np.concatenate([tables_np, known_np[:, width:]], axis=1)

    def _shifts(self) -> tuple[mx.array, mx.array]:
        """Returns [N] int32 each: the lag of `begins`, and of `state_lens` and `last`."""
        lag, num_reqs = self.layout.lag, len(self.counts_np)
        now = lag_of(None if lag is None else lag.counts, num_reqs)
        before = now
        if self.before is not None and self.before.lag is not None:
            before = mx.where(mx.array(self.has_np), self.before.lag, now)
        elif self.before is not None:
            before = mx.where(mx.array(self.has_np), 0, now)
        if not len(self.flushed):
            return now, before
        late = lag_of(self.flushed.lag, len(self.flushed))
        return mx.concatenate([now, late]), mx.concatenate([before, late])

    def planned(self, scope: SequenceScope, num_before: int) -> tuple[SequencePlan, Entries]:
        """Returns the plan and the entries for the next step.

        `num_before` is the number of rows that the previous step kept.
        """
        columns = self._columns()
        blocks = _stacked(self._tables(), self.flushed.tables_np)
        # A width that is stable over many steps, so that their compiled graph is too.
        width = stable(max(blocks.shape[1], _FEWEST_BLOCKS))
        blocks = np.pad(blocks, ((0, 0), (0, width - blocks.shape[1])))
        table_np = self._table(columns, blocks)
        if self._lags:
            table = self._exact(table_np, columns, blocks)
        else:
            blocks = _without_passed(blocks, columns.state_lens, columns.begins, self.size)
            table = mx.array(table_np)
        num_new, num_carried = int(self.drafts_np.sum()), self.num_carried
        keeps = num_new + num_carried > 0
        # Fresh and carried rows together have a stable number too.
        num_fresh = stable(max(num_new, 1) + num_carried) - num_carried if keeps else 1
        num_rows = max(int(self.layout.query_start_loc_np[-1]), 1)
        applies = bool(columns.most_kept.any() or num_carried)
        num_before = num_before if applies else 0
        tiles = mx.array(_tiles(table_np[:, sequences.NUM_ROWS]))
        step = Sequences(table, mx.array(blocks), tiles, self.size, num_rows, num_fresh)
        long = None
        if scope.long_prompt is not None and not self._lags:
            long = long_prompts.chosen(step, table_np, blocks, scope.long_prompt)
        groups = None
        if not scope.by_kernels:
            sizes = self.size, num_rows, num_fresh, num_before, columns.most_kept
            groups = sequence_groups.plan(table_np, blocks, *sizes, num_taps=scope.num_taps)
        plan = SequencePlan(
            scope.number,
            step,
            applies=applies,
            keeps=keeps,
            carried=_rows_of(self.carried) if num_carried else None,
            groups=groups,
            reads=None if scope.by_kernels else mx.array(table_np[:, sequences.READ]),
            long=long,
        )
        return plan, self._entries_left(table_np, num_fresh)

    def _table(self, columns: _Columns, blocks: np.ndarray) -> np.ndarray:
        """Returns `Sequences.table`, [N, COLUMNS] int32."""
        begins, state_lens, last, first_kept, _ = columns
        num_flushed = len(self.flushed)
        rows, drafts, starts = (
            np.pad(each, (0, num_flushed)) if num_flushed else each
            for each in (self.counts_np, self.drafts_np, self.layout.query_start_loc_np[:-1])
        )
        numbers = np.arange(len(rows))
        table_np = np.zeros((len(rows), sequences.COLUMNS), np.int32)
        for column, values in {
            sequences.FIRST_ROW: starts,
            sequences.NUM_ROWS: rows,
            sequences.NUM_CERTAIN: rows - drafts,
            sequences.FIRST_KEPT: first_kept,
            sequences.NUM_KEPT: begins - state_lens,
            sequences.POSITION: state_lens,
            sequences.READ: blocks[numbers, np.maximum(last, 0) // self.size],
            sequences.WRITE: blocks[numbers, np.maximum(begins + rows - 1, 0) // self.size],
            sequences.KEEP_AT: np.cumsum(drafts) - drafts,
        }.items():
            table_np[:, column] = values
        return table_np

    def _exact(self, table_np: np.ndarray, columns: _Columns, blocks_np: np.ndarray) -> mx.array:
        """Returns [N, COLUMNS] int32 with upper bounds corrected on the device."""
        now, before = self._shifts()
        blocks = mx.array(blocks_np)

        def block(position: mx.array) -> mx.array:
            return mx.take_along_axis(blocks, mx.maximum(position, 0)[:, None] // self.size, axis=1)

        table = mx.array(table_np)
        state_lens = mx.array(columns.state_lens) - before
        ends = np.maximum(columns.begins + table_np[:, sequences.NUM_ROWS] - 1, 0)
        return mx.concatenate(
            [
                table[:, : sequences.NUM_KEPT],
                (mx.array(columns.begins) - now - state_lens)[:, None],
                state_lens[:, None],
                block(mx.array(columns.last) - before),
                block(mx.array(ends) - now),
                table[:, sequences.KEEP_AT :],
            ],
            axis=1,
        )

    def _entries_left(self, table_np: np.ndarray, first_carried: int) -> Entries:
        """Returns entries of this step's drafts, and those carried over."""
        drafting = np.flatnonzero(self.drafts_np)
        layout, carried = self.layout, self.carried
        if len(carried):
            ends = first_carried + np.cumsum(carried.counts_np)
            carried.first_np[:] = ends - carried.counts_np
        if not len(drafting):
            return carried
        assert layout.req_indices_np is not None
        counts, drafts = self.counts_np[drafting], self.drafts_np[drafting]
        ends = layout.seq_lens_np[drafting]
        lag = None if layout.lag is None else layout.lag.of(drafting.astype(np.int32))
        new = Entries(
            req_indices_np=layout.req_indices_np[drafting].astype(np.int32),
            steps_np=np.full(len(drafting), -1, np.int64),
            certain_rows_np=layout.query_start_loc_np[:-1][drafting] + counts - drafts - 1,
            first_np=table_np[drafting, sequences.KEEP_AT],
            counts_np=drafts,
            state_lens_np=ends - drafts,
            last_np=ends - 1,
            accepted_np=np.full(len(drafting), -1, np.int32),
            tables_np=layout.block_tables_np[drafting],
            lag=None if lag is None else lag.counts,
        )
        return new.joined(carried)


def _stacked(first: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Stacks [R, ...] and [L, ...] block tables to [R + L, W] int32."""
    if not len(others):
        return first
    width = max(first.shape[1], others.shape[1])
    return np.concatenate(
        [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in (first, others)]
    )


def _without_passed(
    blocks_np: np.ndarray, state_lens: np.ndarray, begins: np.ndarray, size: int
) -> np.ndarray:
    """Returns [N, W] blocks; 0 for those that end among accepted drafts, before the last one."""
    # vLLM has taken such a block from the request before this step, and may have given it to
    # another; it never puts one into the prefix cache.
    passed = np.flatnonzero((begins > state_lens) & ((begins - 1) // size > state_lens // size))
    if not len(passed):
        return blocks_np
    blocks_np = blocks_np.copy()
    for index in passed.tolist():
        blocks_np[index, state_lens[index] // size : (begins[index] - 1) // size] = 0
    return blocks_np


def _tiles(rows: np.ndarray) -> np.ndarray:
    """Returns [M, 2] int32, see `Sequences.tiles`."""
    counts = np.maximum(-(-rows // sequences.TILE_ROWS), 1)
    if len(rows) and counts.max() == 1:
        return np.stack([np.arange(len(rows)), np.zeros(len(rows))], axis=1).astype(np.int32)
    owners = np.repeat(np.arange(len(rows)), counts)
    tile_numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owners, tile_numbers * sequences.TILE_ROWS], axis=1).astype(np.int32)


def _rows_of(entries: Entries) -> mx.array:
    """Returns [c] int32, the kept rows of all entries in order."""
    parts: Sequence[np.ndarray] = [
        np.arange(first, first + count)
        for first, count in zip(entries.first_np.tolist(), entries.counts_np.tolist(), strict=True)
    ]
    return mx.array(np.concatenate(parts).astype(np.int32))
