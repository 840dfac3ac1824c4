# SPDX-License-Identifier: Apache-2.0
"""Describes where the rows of a ragged batch lie in the pool, and how far positions lag."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

#: Block sizes that the attention kernels support.
BLOCK_SIZES = (16, 32)
#: Sizes per power of two, see `stable`.
_SIZES = 8


def stable(size: int) -> int:
    """Rounds a size up by at most a seventh, so that successive steps often have equal sizes."""
    # Steps with the same array shapes reuse the previous step's graph.
    unit = max(1, (1 << (size - 1).bit_length()) // (2 * _SIZES))
    return -(-size // unit) * unit


@dataclass(frozen=True)
class PositionLag:
    """Difference between the host's positions of R requests and the true ones on the device.

    The host counts all drafts of a step whose results it has not read; some may be rejected.
    """

    counts: mx.array  # [R] int32
    most_np: np.ndarray  # [R] int32, upper bounds of `counts`

    @cached_property
    def shift(self) -> mx.array:
        """[max(R, 2), 4] int32, what the kernels subtract from the requests' contexts."""
        rows = self.counts if len(self.counts) > 1 else mx.pad(self.counts, (0, 1))
        return rows[:, None] * mx.array([0, 0, 1, 1], mx.int32)

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
