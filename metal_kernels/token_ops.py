# SPDX-License-Identifier: Apache-2.0
"""Shares checks of steps and of state locations between ops that work token by token."""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from metal_kernels import op_common
from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.sequences import COLUMNS, Sequences, StatePart

#: Alignment of a state's parts, and of a block's bytes per head.
UNIT_BYTES = 16
#: By dtype, bound instead of missing rows.
NO_ROWS = {dtype: mx.array([0.0] * MIN_ELEMENTS, dtype) for dtype in op_common.VALUE_DTYPES}


def step_inputs(sequences: Sequences) -> tuple[mx.array, mx.array]:
    """Returns a step's table and blocks as kernels bind them.

    Raises ValueError: shapes or dtypes are not those of `Sequences`.
    """
    table, blocks = sequences.table, sequences.blocks
    check_rows("sequences.table", table, (-1, COLUMNS), (mx.int32,))
    check_rows("sequences.blocks", blocks, (len(table), -1), (mx.int32,))
    check_rows("sequences.tiles", sequences.tiles, (-1, 2), (mx.int32,))
    if not 0 < len(table) <= len(sequences.tiles):
        raise ValueError(
            f"sequences: expected requests, and a tile for each, found {len(table)} requests and "
            f"{len(sequences.tiles)} tiles"
        )
    if blocks.size < MIN_ELEMENTS:
        columns = -(-MIN_ELEMENTS // len(table))
        blocks = mx.pad(blocks, [(0, 0), (0, columns - blocks.shape[1])])
    return table, blocks


def state_template(
    pools: Sequence[mx.array], part: StatePart, shape: tuple[int, ...], split: int
) -> list[tuple[str, Any]]:
    """Returns template arguments for states of `shape` in blocks of `split` parts.

    Raises ValueError: the pools do not match, or the part does not fit in a block.
    """
    _check_pools(pools, split)
    keys, values = (split * math.prod(pool.shape[2:]) for pool in (pools[0], pools[-1]))
    dtype = pools[0].dtype
    if keys * dtype.size % UNIT_BYTES or values * dtype.size % UNIT_BYTES:
        raise ValueError(
            f"pools: expected blocks of a multiple of {UNIT_BYTES} bytes a head, "
            f"found {keys} and {values} elements of {dtype}"
        )
    room = sum(op_common.block_elements(pool, split) for pool in pools) * dtype.size
    end = part.start + math.prod(part.shape) * part.dtype.size
    if part.shape != shape or part.dtype not in op_common.VALUE_DTYPES:
        raise ValueError(f"part: expected {shape} floats, found {part.shape} {part.dtype}")
    if part.start < 0 or part.start % UNIT_BYTES or end > room:
        raise ValueError(
            f"part: expected to begin at a multiple of {UNIT_BYTES} and to end by byte {room} "
            f"of a block, found bytes {part.start} to {end}"
        )
    return [
        ("P", dtype),
        ("S", part.dtype),
        ("START", part.start),
        ("KEYS", keys),
        ("VALUES", values),
        ("NUM_HEADS", pools[0].shape[0]),
        ("SPLIT", split),
    ]


def padded(array: mx.array) -> mx.array:
    """Pads an array of fewer than MIN_ELEMENTS, flattened, with zeros."""
    enough = array.size >= MIN_ELEMENTS
    return array if enough else op_common.padded(array.flatten(), fill=0)


def check_rows(
    name: str, rows: mx.array, shape: tuple[int, ...], dtypes: Sequence[mx.Dtype]
) -> None:
    """Raises ValueError unless rows have this shape (-1: any size) and one of the dtypes."""
    fits = rows.ndim == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, rows.shape, strict=True)
    )
    if not fits or rows.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
        sizes = ", ".join("*" if size < 0 else str(size) for size in shape)
        raise ValueError(f"{name}: expected [{sizes}] {kinds}, found {rows.shape} {rows.dtype}")


def _check_pools(pools: Sequence[mx.array], split: int) -> None:
    layouts = {(pool.dtype, *pool.shape[:2]) for pool in pools}
    if len(pools) not in (1, 2) or len(layouts) != 1 or pools[0].shape[1] % split:
        raise ValueError(
            f"pools: expected one or two [Hkv, B * {split}, ...] alike in dtype, Hkv and B, "
            f"found {[pool.shape for pool in pools]}"
        )
