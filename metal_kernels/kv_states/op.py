# SPDX-License-Identifier: Apache-2.0
"""Implements read() and write(), which move states between blocks and rows of bits.

A state fills a block's K, head by head, and continues in its V. A write clears the rest of K, and
of V if the state continues there: nothing of the block's last owner remains.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels import kernel, op_common

_THREADS = 256  # per threadgroup
_RUN_BYTES = 16  # per thread at most: the widest load of Metal
_FOLDER = Path(__file__).parent
_POOLS = ("key_pool", "value_pool")
_AFTER = ("after_0", "after_1")
_READ = kernel.load(
    _FOLDER / "read_states.metal",
    input_names=(*_POOLS, "blocks", *_AFTER),
    output_names=("states", "fence"),
)
_WRITE = kernel.load(
    _FOLDER / "write_states.metal",
    input_names=(*_POOLS, "blocks", "states", *_AFTER),
    output_names=("fence",),
)


def read(
    pools: Sequence[mx.array],
    blocks: mx.array,
    width: int,
    split: int = 1,
    after: Sequence[mx.array] = (),
) -> tuple[mx.array, mx.array]:
    """Reads the states of n blocks.

    Args:
        pools: keys, and values if any: [Hkv, B * split, ...], row-contiguous, with equal dtype and
            Hkv.
        blocks: [n] int32, below B.
        width: elements of a state, at least MIN_ELEMENTS and at most a block's.
        split: parts of a block.
        after: fences of earlier dispatches.

    Returns:
        states: [n, width] unsigned integers of the pools' element size.
        fence: [8] uint32, for writes that must wait for this read.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    _check_pools(pools, width, split)
    if blocks.ndim != 1 or blocks.dtype != mx.int32:
        raise ValueError(f"blocks: expected [n] int32, found {blocks.shape} {blocks.dtype}")
    bits = op_common.BITS[pools[0].dtype.size]
    if blocks.size == 0:
        return mx.zeros((0, width), bits), op_common.merged(after)
    states, fence = _READ(
        inputs=[
            pools[0],
            pools[-1],
            op_common.padded(blocks, fill=0),
            *op_common.fences(after),
        ],
        **_launch(pools, blocks.size, width, split, width),
        output_shapes=[(blocks.size, width), op_common.FENCE_SHAPE],
        output_dtypes=[bits, op_common.FENCE_DTYPE],
    )
    return states, fence


def write(
    pools: Sequence[mx.array],
    blocks_np: np.ndarray,
    states: mx.array,
    split: int = 1,
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Writes states into blocks in place; the write runs when the fence is evaluated.

    Args:
        pools, split, after: see `read`.
        blocks_np: [n] distinct integers on the host, one per state.
        states: [n, width] as `read` returns them.

    Returns:
        [8] uint32, the fence of this write.

    Raises:
        ValueError: shapes or dtypes are invalid, or a block is outside the pool.
    """
    if states.ndim != 2 or len(states) != len(blocks_np):
        raise ValueError(f"states: expected [{len(blocks_np)}, width], found {states.shape}")
    _check_pools(pools, states.shape[1], split)
    if states.dtype != op_common.BITS[pools[0].dtype.size]:
        raise ValueError(
            f"states: expected unsigned integers of the size of {pools[0].dtype}, "
            f"found {states.dtype}"
        )
    op_common.check_blocks("blocks_np", blocks_np, pools[0].shape[1] // split)
    if len(set(blocks_np.tolist())) != len(blocks_np):  # faster than numpy for a few blocks
        raise ValueError("blocks_np: a block is named twice")
    if not len(blocks_np):
        return op_common.merged(after)
    width, of_keys = states.shape[1], _room(pools[:1], split)
    used = of_keys if width <= of_keys else _room(pools, split)
    (fence,) = _WRITE(
        inputs=[
            pools[0],
            pools[-1],
            op_common.padded(mx.array(blocks_np.astype(np.int32)), fill=0),
            states,
            *op_common.fences(after),
        ],
        **_launch(pools, len(blocks_np), width, split, used),
        output_shapes=[op_common.FENCE_SHAPE],
        output_dtypes=[op_common.FENCE_DTYPE],
    )
    return fence


def _room(pools: Sequence[mx.array], split: int) -> int:
    return sum(op_common.block_elements(pool, split) for pool in pools)


def _launch(
    pools: Sequence[mx.array], count: int, width: int, split: int, touched: int
) -> dict[str, Any]:
    """Returns launch arguments to read or write `touched` elements in each of `count` blocks."""
    dtype = pools[0].dtype
    keys, values = (split * math.prod(pool.shape[2:]) for pool in (pools[0], pools[-1]))
    # The largest run that divides all boundaries, so that no thread's move crosses one.
    run = math.gcd(keys, values, width, _RUN_BYTES // dtype.size)
    return {
        "template": [
            ("T", dtype),
            ("U", op_common.BITS[dtype.size]),
            ("KEYS", keys),
            ("VALUES", values),
            ("NUM_HEADS", pools[0].shape[0]),
            ("SPLIT", split),
            ("WIDTH", width),
            ("RUN", run),
        ],
        "grid": (touched // run, count, 1),
        "threadgroup": (min(_THREADS, touched // run), 1, 1),
    }


def _check_pools(pools: Sequence[mx.array], width: int, split: int) -> None:
    shapes = [pool.shape for pool in pools]
    layouts = {(pool.dtype, *pool.shape[:2]) for pool in pools}
    if len(pools) not in (1, 2) or len(layouts) != 1 or pools[0].shape[1] % split:
        raise ValueError(
            f"pools: expected one or two [Hkv, B * {split}, ...] alike in dtype, Hkv and B, "
            f"found {shapes}"
        )
    room = _room(pools, split)
    if not kernel.MIN_ELEMENTS <= width <= room:
        raise ValueError(
            f"width: expected {kernel.MIN_ELEMENTS} to {room} elements, which a block has, "
            f"found {width}"
        )
