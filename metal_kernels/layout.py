# SPDX-License-Identifier: Apache-2.0
"""Describes where the rows of a ragged batch lie in the pool: slots, tables, who is behind."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

#: Tokens of a block that the attention kernels are written for.
BLOCK_SIZES = (16, 32)
#: Sizes from one power of two to the next, see `stable`.
_SIZES = 8


def stable(size: int) -> int:
    """The size, rounded up so that it stays for many steps, by a seventh at most.

    Arrays of a step then have the shapes of the step before, as a rule, and its graph serves again.
    """
    unit = max(1, (1 << (size - 1).bit_length()) // (2 * _SIZES))
    return -(-size // unit) * unit


@dataclass(frozen=True)
class PositionLag:
    """How far before the host's positions a step's R requests are, which only the device knows.

    The host counts all drafts of a step whose outcome it has not read; some may be rejected.
    """

    counts: mx.array  # [R] int32
    most_np: np.ndarray  # [R] int32, the most that each of them can be

    def of(self, indices_np: np.ndarray) -> PositionLag:
        """Returns it for some of the requests, by [n] indices, which may repeat."""
        return PositionLag(self.counts[mx.array(indices_np)], self.most_np[indices_np])


@dataclass(frozen=True)
class RaggedLayout:
    """Where a step's R requests and T rows lie in the pool, for layers that share block tables."""

    query_start_loc_np: np.ndarray  # [R + 1] int32, first row of each request
    seq_lens_np: np.ndarray  # [R] int32, context including this step's rows
    block_tables_np: np.ndarray  # [R, W] int32, up to the longest context
    slot_mapping_np: np.ndarray  # [T] int32, where each row's K/V go: block * block_size + offset
    block_size: int
