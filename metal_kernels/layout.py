# SPDX-License-Identifier: Apache-2.0
"""Describes where the rows of a ragged batch lie in the pool, and how far positions lag."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import mlx.core as mx
import numpy as np

#: Block sizes that the attention kernels support.
BLOCK_SIZES = (16, 32)
#: Columns of a kernel's Request that a lag shifts: its first position and its context.
_SHIFTED = mx.array([0, 0, 1, 1], mx.int32)
_ONE_SHIFTED = mx.array([[0, 0, 1, 1], [0, 0, 0, 0]], mx.int32)
#: Sizes per power of two, see `stable`.
_SIZES = 8


def stable(size: int) -> int:
    """Rounds a size up by at most a seventh, so that successive steps often have equal sizes."""
    # Steps with the same array shapes reuse the previous step's graph.
    unit = max(1, (1 << (size - 1).bit_length()) // (2 * _SIZES))
    return -(-size // unit) * unit


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """Index arrays of N rows that belong to R groups in turn, such as a step's tokens to requests.

    They only depend on the groups' numbers of rows, which most steps repeat, so `of` keeps them.
    """

    lens_np: np.ndarray  # [R] int32, rows of each group
    starts_np: np.ndarray  # [R + 1] int32, first row of each group, and N
    groups_np: np.ndarray  # [N] int32, group of each row
    offsets_np: np.ndarray  # [N] int32, index of each row in its group

    @staticmethod
    def of(lens_np: np.ndarray) -> RaggedRows:
        """Returns the rows of groups of [R] int32 numbers of rows; the arrays are read-only."""
        return _ragged_rows(lens_np.astype(np.int32, copy=False).tobytes())

    @cached_property
    def firsts(self) -> mx.array:
        """[R] int32, first row of each group."""
        return mx.array(self.starts_np[:-1])

    @cached_property
    def lasts(self) -> mx.array:
        """[R] int32, offset of each group's last row: one less than its rows."""
        return mx.array(self.lens_np - 1)

    @cached_property
    def groups(self) -> mx.array:
        """[N] int32, `groups_np`."""
        return mx.array(self.groups_np)

    @cached_property
    def offsets(self) -> mx.array:
        """[N] int32, `offsets_np`."""
        return mx.array(self.offsets_np)

    @cached_property
    def shortest(self) -> int:
        """Rows of the smallest group, at most 1."""
        return int(self.lens_np.min(initial=1))

    @cached_property
    def even_length(self) -> int | None:
        """Rows of each group, if all have the same number; else None."""
        lens = set(self.lens_np.tolist())
        return lens.pop() if len(lens) == 1 else None


@lru_cache(maxsize=32)
def _ragged_rows(lens: bytes) -> RaggedRows:
    lens_np = np.frombuffer(lens, np.int32)
    starts_np = np.zeros(len(lens_np) + 1, np.int32)
    np.cumsum(lens_np, out=starts_np[1:])
    groups_np = np.arange(len(lens_np), dtype=np.int32).repeat(lens_np)
    offsets_np = np.arange(len(groups_np), dtype=np.int32) - starts_np[groups_np]
    for array_np in (starts_np, groups_np, offsets_np):
        array_np.flags.writeable = False
    return RaggedRows(lens_np, starts_np, groups_np, offsets_np)


@dataclass(frozen=True)
class PositionLag:
    """Difference between the host's positions of R requests and the true ones on the device.

    The host counts all drafts of a step whose results it has not read; some may be rejected.
    """

    counts: mx.array  # [R] int32
    most_np: np.ndarray  # [R] int32, upper bounds of `counts`
    _exact: dict[tuple[bytes, RaggedRows], mx.array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def shift(self) -> mx.array:
        """[max(R, 2), 4] int32, what the kernels subtract from the requests' contexts."""
        if self.counts.size == 1:
            return self.counts * _ONE_SHIFTED
        return self.counts[:, None] * _SHIFTED

    def exact(self, positions_np: np.ndarray, rows: RaggedRows) -> mx.array:
        """Returns [T] int32, true positions from the host's [T]; kept for equal ones.

        `rows`: the tokens of the R requests.
        """
        key = positions_np.tobytes(), rows
        if key not in self._exact:
            self._exact[key] = mx.array(positions_np) - self.counts[rows.groups]
        return self._exact[key]

    def of(self, indices_np: np.ndarray) -> PositionLag:
        """Returns the lag of requests at [n] indices, which may repeat."""
        return PositionLag(self.counts[mx.array(indices_np)], self.most_np[indices_np])


@dataclass(frozen=True)
class RaggedLayout:
    """Pool slots and block tables of a step's R requests and T rows, for layers that share them."""

    query_start_loc_np: np.ndarray  # [R + 1] int32, first row of each request
    seq_lens_np: np.ndarray  # [R] int32, context including this step's rows
    block_tables_np: np.ndarray  # [R, W] int32, wide enough for the longest context
    slot_mapping_np: np.ndarray  # [T] int32, slot of each row's K/V: block * block_size + offset
    block_size: int
