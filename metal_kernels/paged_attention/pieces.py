# SPDX-License-Identifier: Apache-2.0
"""Divides a step's rows into pieces, and these into dispatches of at most MOST_WORK."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from metal_kernels.paged_attention.shape import AttentionShape
from metal_kernels.paged_attention.tiles import NO_WINDOW, STRIP


def starts(counts: np.ndarray) -> np.ndarray:
    """Returns the first index of each consecutive run, given the lengths of the runs."""
    return counts.cumsum() - counts


@dataclass(frozen=True)
class Pieces:
    """P pieces in output order: consecutive rows of one request, beginning a new tile."""

    request: np.ndarray  # [P]
    first_row: np.ndarray  # [P] among the request's rows in this step
    num_rows: np.ndarray  # [P]
    whole: bool = False  # whether each is known to be all rows of its request


@dataclass(frozen=True)
class Batch:
    """A step's R requests, and the layers' shape and window."""

    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    query_lens: np.ndarray  # [R]
    first_positions: np.ndarray  # [R] of each request's first row
    most_behind: np.ndarray  # [R] largest lag of both
    shift: mx.array | None  # [max(R, 2), 4] int32, to subtract from Request; None: nothing
    shape: AttentionShape
    window: int
    bidirectional: bool = False  # whether rows of a request see those after them, too

    @staticmethod
    def of(
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        shape: AttentionShape,
        window: int | None,
        lag: PositionLag | None,
        bidirectional: bool,
    ) -> Batch:
        """Derives a batch from the arguments of `plan.plan`."""
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        return Batch(
            query_start_loc,
            seq_lens,
            query_lens,
            seq_lens - query_lens,
            np.zeros_like(seq_lens) if lag is None else lag.most_np,
            None if lag is None else lag.shift,
            shape,
            window or NO_WINDOW,
            bidirectional,
        )

    def packed_step(self, rows: int) -> int:
        """Rounds the packed rows of a tile down to whole query rows, if it can hold one."""
        return rows // self.shape.group * self.shape.group or rows

    def pieces(self, members: np.ndarray, rows: int, most_work: int) -> Iterator[Pieces]:
        """Divides requests `members`, in tiles of `rows`, into dispatches of up to `most_work`."""
        # No two pieces of a request are in the same dispatch, as each but the last fills it.
        group, step = self.shape.group, self.packed_step(rows)
        lens = self.query_lens[members]
        # Most keys of a tile: it spans step / group query rows, or two, and begins at a strip.
        spanned = int(lens.max()) if self.bidirectional else max(step // group, 2)
        seen = self.window + spanned + STRIP - 2 + int(self.most_behind.max())
        num_tiles = int(lens.sum()) * group // step + len(lens)  # at most
        if num_tiles * self.shape.work(rows, min(seen, int(self.seq_lens.max()))) <= most_work:
            yield Pieces(members, np.zeros_like(members), lens, whole=True)  # in most steps
            return
        keys = np.minimum(self.seq_lens[members].astype(np.int64), seen)
        of_tile = keys * self.shape.work(rows, 1)
        at_once = np.maximum(np.maximum(most_work // of_tile, 1) * step // group, 1)  # query rows
        counts = -(-lens // at_once)
        owner = np.repeat(np.arange(len(members)), counts)
        first = (np.arange(len(owner)) - starts(counts)[owner]) * at_once[owner]
        num_rows = np.minimum(at_once[owner], lens[owner] - first)
        work = -(-num_rows * group // step) * of_tile[owner]
        for piece in _slices_by_work(work, most_work):
            yield Pieces(members[owner[piece]], first[piece], num_rows[piece])


def output_order(batch: Batch, pieces: Sequence[Pieces]) -> mx.array | None:
    """Returns the position of each row in the dispatches' outputs, [T] int32; None: in order."""
    first = np.concatenate([batch.query_start_loc[x.request] + x.first_row for x in pieces])
    lens = np.concatenate([x.num_rows for x in pieces])
    positions = np.arange(lens.sum(), dtype=np.int32)
    written = np.repeat(first - starts(lens), lens) + positions  # batch row of each output row
    if (written == positions).all():
        return None
    order = np.empty_like(positions)
    order[written] = positions
    return mx.array(order)


def _slices_by_work(work: np.ndarray, most: int) -> Iterator[slice]:
    """Splits `work` into slices with sums of at most `most`; a larger element is a slice alone."""
    ends, start = np.cumsum(work), 0
    while start < len(work):
        before = ends[start] - work[start]
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        yield slice(start, stop)
        start = stop
