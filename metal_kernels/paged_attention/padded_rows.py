# SPDX-License-Identifier: Apache-2.0
"""A bucket's padded queries and block tables, and where a step writes in these blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

#: Pairs of a table's block and a row that are compared one by one: 15 microseconds.
FEW_PAIRS = 1 << 15


@dataclass(frozen=True)
class PaddedQueries:
    """A bucket's query rows, padded to the longest."""

    rows: np.ndarray  # [n, Q] int32, batch row; padding repeats the first
    real: np.ndarray  # [n, Q] bool, False for padding

    @staticmethod
    def padded(starts: np.ndarray, query_lens: np.ndarray) -> PaddedQueries:
        """Pads requests with [n] first batch rows and numbers of rows to the longest, Q."""
        offsets = np.arange(int(query_lens.max()), dtype=np.int32)
        real = offsets < query_lens[:, None]
        rows = np.where(real, starts[:, None] + offsets, starts[:, None])
        return PaddedQueries(rows, real)


@dataclass(frozen=True)
class PaddedTable:
    """A bucket's block tables, padded to the widest."""

    blocks: np.ndarray  # [n, W] int32; padding repeats the last
    real: np.ndarray  # [n, W] bool, False for padding

    @staticmethod
    def padded(
        tables: np.ndarray, first: np.ndarray, count: np.ndarray | list[int], width: int
    ) -> PaddedTable:
        """Pads `count` blocks of each request, from `first` on, to `width` columns."""
        columns, count = np.arange(width), np.asarray(count)[:, None]
        positions = first[:, None] + np.minimum(columns, count - 1)
        blocks = np.take_along_axis(tables, positions, axis=1).astype(np.int32)
        return PaddedTable(blocks, columns < count)


class StepWrites:
    """Maps pool slots to the batch rows that write them in this step."""

    def __init__(
        self, slot_mapping: np.ndarray, block_size: int, earlier: np.ndarray | None = None
    ) -> None:
        self.left_out = bool((slot_mapping < 0).any())  # whether some rows are never read
        self.follow = earlier is not None  # whether rows of previous steps are included
        self._num_tokens = len(slot_mapping)
        if earlier is not None:
            slot_mapping = np.concatenate([earlier, slot_mapping])
        self._all_slots = slot_mapping
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._all_slots)

    @cached_property
    def _in_order(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows by rising slots, these slots, and the blocks that they are in."""
        rows = np.argsort(self._all_slots).astype(np.int32)
        slots = self._all_slots[rows]
        return rows, slots, np.unique(slots // self._block_size)

    def into(self, table: PaddedTable) -> tuple[np.ndarray, np.ndarray]:
        """Returns slots of the flattened context that this step writes, and their batch rows."""
        size, offsets = self._block_size, np.arange(self._block_size)
        if table.blocks.size * len(self) <= FEW_PAIRS:  # fewer calls, which take most of the time
            blocks, offsets = np.divmod(self._all_slots, size)
            here = (table.blocks[:, :, None] == blocks) & table.real[:, :, None]
            touched, rows = here.reshape(-1, len(self)).nonzero()
            return (touched * size + offsets[rows]).astype(np.int32), rows.astype(np.int32)
        by_slot, written_slots, written_blocks = self._in_order
        touched = np.flatnonzero(np.isin(table.blocks, written_blocks) & table.real)
        slots = (table.blocks.ravel()[touched, None] * size + offsets).ravel()
        positions = (touched[:, None] * size + offsets).ravel()
        nearest = np.minimum(np.searchsorted(written_slots, slots), len(by_slot) - 1)
        written = written_slots[nearest] == slots
        return positions[written].astype(np.int32), by_slot[nearest[written]]

    def in_order(self, table: PaddedTable, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `into`, but returns all rows of `members`, step by step: one per request and step.

        Rows that are never read go to their request's last slot, which is padding.
        """
        (n, width), size = table.blocks.shape, self._block_size
        num_requests = self._num_tokens
        slots = self._all_slots.reshape(-1, num_requests)[:, members]  # [steps, n]
        here = (table.blocks == (slots // size)[:, :, None]) & table.real
        positions = np.where(
            here.any(axis=2), here.argmax(axis=2) * size + slots % size, width * size - 1
        )
        rows = np.arange(len(slots))[:, None] * num_requests + members
        positions = positions + np.arange(n) * width * size
        return positions.ravel().astype(np.int32), rows.ravel().astype(np.int32)
