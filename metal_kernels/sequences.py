# SPDX-License-Identifier: Apache-2.0
"""Describes a step to kernels that go from token to token: rows, drafts and states by request.

A request keeps the state after its last token that is certain, in a block of the pool, and the
inputs of the drafts behind it: its *kept rows*. The next step first applies those that were
accepted, then its own rows: those up to the last certain one change the state that it writes back;
its drafts only have outputs, and become kept rows in turn. So a step reads a state once and writes
it once, however many drafts it verifies.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

#: Columns of `Sequences.table`.
FIRST_ROW = 0  # of the step's T, the first of this request
NUM_ROWS = 1  # of the step; 0: only kept rows are applied
NUM_CERTAIN = 2  # of those, how many come before the request's drafts
FIRST_KEPT = 3  # of the kept rows, the first that is applied
NUM_KEPT = 4  # how many are applied, before the step's rows
POSITION = (
    5  # in the request, of the first row that is applied or computed; 0: there is no state yet
)
READ = 6  # block that the state lies in; of no meaning at position 0
WRITE = 7  # block that gets the state after the last certain row; 0: nowhere
KEEP_AT = 8  # where this request's drafts begin among the rows that are kept for the next step
COLUMNS = 9
#: Rows that a threadgroup of the convolution takes.
TILE_ROWS = 64


@dataclass(frozen=True)
class Sequences:
    """The way of N requests through a step of T rows."""

    table: mx.array  # [N, COLUMNS] int32; NUM_KEPT, POSITION, READ, WRITE may be the device's alone
    #: [N, W] int32, the request's blocks by number: where the token after which a state is certain
    #: is its block's last, that block gets the state; 0: it does not.
    blocks: mx.array
    #: [M, 2] int32: a request, and the first of up to TILE_ROWS of its rows, counted from the
    #: request's first of the step; one tile, from 0, for a request that has no rows too. One that
    #: begins past its request's rows is only room for a tile, as a table's row of zeros is for a
    #: request.
    tiles: mx.array
    block_size: int  # tokens of a block
    num_rows: int  # T
    num_kept: int  # rows to be kept for the next step, 1 at least; those of no draft are arbitrary


@dataclass(frozen=True)
class RecurrenceInputs:
    """What a row puts into a state, of T rows or of kept ones.

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
    """Where a part of a state lies among its bytes, and what it is."""

    start: int  # in bytes, a multiple of 16
    shape: tuple[int, ...]
    dtype: mx.Dtype
