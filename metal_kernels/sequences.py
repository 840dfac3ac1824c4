# SPDX-License-Identifier: Apache-2.0
"""Describes a step's rows, drafts and states, for kernels that work token by token.

A request keeps the state after its last certain token in a block of the pool, and the inputs of the
drafts after it: its *kept rows*. The next step first applies those that were accepted, then its own
rows: those up to the last certain one change the stored state; drafts only have outputs, and become
kept rows. So a step reads and writes a state once for any number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

#: Columns of `Sequences.table`.
FIRST_ROW = 0  # index of the request's first row in the step's T
NUM_ROWS = 1  # in the step; 0: only kept rows are applied
NUM_CERTAIN = 2  # rows before the request's drafts
FIRST_KEPT = 3  # index of the first kept row to apply
NUM_KEPT = 4  # kept rows to apply before the step's rows
POSITION = 5  # of the first row that is applied or computed; 0: no state yet
READ = 6  # block of the state; unused at position 0
WRITE = 7  # block for the state after the last certain row; 0: none
KEEP_AT = 8  # index of this request's first draft in the rows kept for the next step
COLUMNS = 9
#: Rows per threadgroup of the convolution.
TILE_ROWS = 64


@dataclass(frozen=True)
class Sequences:
    """The rows, blocks and tiles of a step's N requests, T rows in all, as kernels read them."""

    table: mx.array  # [N, COLUMNS] int32; only the device may know NUM_KEPT, POSITION, READ, WRITE
    #: [N, W] int32, the request's blocks in order: a block whose last token has a certain state
    #: gets that state; 0: it does not.
    blocks: mx.array
    #: [M, 2] int32: a request, and the first of up to TILE_ROWS of its rows in this step; a request
    #: without rows has one tile too. A tile that begins after its request's rows is padding, like a
    #: table row of zeros.
    tiles: mx.array
    block_size: int  # tokens of a block
    num_rows: int  # T
    num_kept: int  # rows kept for the next step, at least 1; arbitrary if not drafts


@dataclass(frozen=True)
class RecurrenceInputs:
    """Inputs of a recurrence, for T rows or for kept ones.

    A state is HV heads of [DV, DK]; head h has the keys of head h // (HV / HK). With k, v of the
    row, decay d, rate r:

        S <- S * d;  S <- S + r * (v - S k) k^T   by the delta rule
        S <- S * d + r * v k^T                    in state-space models

    (Yang et al. 2024, arXiv:2412.06464; Dao and Gu 2024, arXiv:2405.21060.)
    """

    keys: mx.array  # [T, HK, DK]
    values: mx.array  # [T, HV, DV]
    rates: mx.array  # [T, HV] float32
    #: [T, HV] or [T, HV, DK] float32, between 0 and 1; None: exp(rate * A), A of the layer.
    decays: mx.array | None


@dataclass(frozen=True)
class StatePart:
    """A part of a state, and its location among the state's bytes."""

    start: int  # in bytes, a multiple of 16
    shape: tuple[int, ...]
    dtype: mx.Dtype
