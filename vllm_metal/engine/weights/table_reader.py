# SPDX-License-Identifier: Apache-2.0
"""Reads single rows of a table from a checkpoint's files, and keeps those used last."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from vllm_metal.metrics.step_metrics import measure

#: Memory for the rows used last: 2,184 rows of Gemma 3n E2B in 16 bits (7,680 values), 7,767 in 4
#: bits. With so many, 93 and 97 % of the tokens of this repository's pages are cached, and 97 and
#: 99 % of its code's (SmolLM2's tokens). Nearly all of the rest come from the system's file cache.
CACHE_BYTES = 32 << 20
_BATCHES = 64  # a full cache evicts one of so many parts at a time
_FREE = np.iinfo(np.int64).max  # last use of slots that hold no row


class TableError(RuntimeError):
    """A row of a table on disk could not be read."""


@dataclass(frozen=True)
class StoredRows:
    """A stored tensor, or a shard of one by rows, of which each row is read on its own."""

    file: Path
    offset: int  # file offset of the first row
    num_rows: int
    row_bytes: int


class TableReader:
    """Reads rows of a table, which consists of one or more tensors with as many rows.

    A tensor may be stored in shards of rows, one after another.

    Rows are read by calls, not through a memory map: a page of a file that was cut off would end
    the process. Files stay open, so a file that is removed or replaced is read on.
    """

    def __init__(
        self, parts: Sequence[Sequence[StoredRows]], cache_bytes: int = CACHE_BYTES
    ) -> None:
        """`parts`: the shards of each tensor."""
        self._starts = [
            np.cumsum([0, *(shard.num_rows for shard in shards)]).tolist() for shards in parts
        ]
        self.num_rows = self._starts[0][-1]
        self._parts = parts
        self._ends = np.cumsum([0, *(shards[0].row_bytes for shards in parts)]).tolist()
        self._capacity = min(max(cache_bytes // self._ends[-1], 1), self.num_rows)
        self._slots: dict[int, int] = {}  # slots of cached rows by id
        self._now = 0  # number of uses so far

    @property
    def num_cached(self) -> int:
        """Number of rows in the cache."""
        return len(self._slots)

    @property
    def cache_bytes(self) -> int:
        """Most bytes of rows in the cache."""
        return int(self._capacity * self._ends[-1])

    @cached_property
    def _files(self) -> dict[Path, BinaryIO]:
        paths = {shard.file for shards in self._parts for shard in shards}
        return {path: path.open("rb", buffering=0) for path in paths}

    @cached_property
    def _rows(self) -> npt.NDArray[np.uint8]:
        # [capacity, bytes of all parts]; numpy's memory is the system's until it is written.
        return np.empty((self._capacity, self._ends[-1]), np.uint8)

    @cached_property
    def _ids(self) -> npt.NDArray[np.int64]:
        return np.full(self._capacity, -1, np.int64)  # by slot; -1: empty

    @cached_property
    def _used(self) -> npt.NDArray[np.int64]:
        return np.full(self._capacity, _FREE)  # by slot, when it was used last

    @cached_property
    def _free(self) -> list[int]:
        return list(range(self._capacity))[::-1]  # empty slots

    def read(self, ids_np: np.ndarray, outs: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Writes rows of each part to `outs`, reading each id once.

        Args:
            ids_np: [T] integers from 0 to num_rows - 1.
            outs: [T, row_bytes] per part.

        Raises:
            TableError: a file cannot be read, or was cut off.
        """
        unique, inverse = np.unique(ids_np, return_inverse=True)
        for first in range(0, len(unique), self._capacity):
            some = unique[first : first + self._capacity]
            slots = self._slots_of(some)
            tokens = np.flatnonzero((inverse >= first) & (inverse < first + len(some)))
            rows = slots[inverse[tokens] - first]
            for index, out in enumerate(outs):
                begin, end = self._ends[index : index + 2]
                out[tokens] = self._rows[rows, begin:end]

    def _slots_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the slots of [n] distinct ids, n at most the capacity; reads the missing rows."""
        get = self._slots.get
        slots = np.fromiter((get(id_, -1) for id_ in ids.tolist()), np.int64, len(ids))
        missing = np.flatnonzero(slots < 0)
        self._now += 1
        self._used[slots[slots >= 0]] = self._now
        if not len(missing):
            return slots
        if len(missing) > len(self._free):
            self._evict(len(missing) - len(self._free), most=len(self._slots) - len(ids))
        for index, id_ in zip(missing.tolist(), ids[missing].tolist(), strict=True):
            slot = self._free[-1]
            self._read_row(id_, slot)
            self._free.pop()
            self._slots[id_], self._ids[slot], self._used[slot] = slot, id_, self._now
            slots[index] = slot
        measure("table_bytes", len(missing) * self._ends[-1])
        return slots

    def _evict(self, count: int, most: int) -> None:
        """Frees the slots that were used longest ago: `count`, or a batch of at most `most`."""
        # Finding them takes as long as the cache is large.
        count = max(count, min(self._capacity // _BATCHES, most))
        oldest = np.argpartition(self._used, count - 1)[:count]
        for id_ in self._ids[oldest].tolist():
            del self._slots[id_]
        self._ids[oldest], self._used[oldest] = -1, _FREE
        self._free += oldest.tolist()[::-1]

    def _read_row(self, id_: int, slot: int) -> None:
        row = self._rows[slot]
        for index, (shards, starts) in enumerate(zip(self._parts, self._starts, strict=True)):
            number = bisect_right(starts, id_) - 1
            shard = shards[number]
            target = memoryview(row[self._ends[index] : self._ends[index + 1]])
            offset = shard.offset + (id_ - starts[number]) * shard.row_bytes
            try:
                count = os.preadv(self._files[shard.file].fileno(), [target], offset)
            except OSError as error:
                raise _unreadable(shard, id_, str(error)) from error
            if count < shard.row_bytes:
                raise _unreadable(shard, id_, "the file was cut off")


def _unreadable(shard: StoredRows, id_: int, reason: str) -> TableError:
    return TableError(
        f"row {id_} of an embedding table cannot be read from {shard.file}: {reason}. Restore the "
        "file and restart the server"
    )
