# SPDX-License-Identifier: Apache-2.0
"""Implements copy() and zero() of whole blocks, over all heads, with one dispatch per pool."""

import math
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_kernels import kernel, op_common

_THREADS = 256  # per threadgroup
_RUN_BYTES = 16  # bytes per thread
_KERNEL = kernel.load(
    Path(__file__).with_name("kv_blocks.metal"),
    input_names=("pool", "sources", "targets", "after_0", "after_1"),
    output_names=("fence",),
)


def copy(
    pools: Sequence[mx.array],
    sources: np.ndarray,
    targets: np.ndarray,
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Copies blocks within each pool in place; the copy runs when the fence is evaluated.

    Args:
        pools: [Hkv, B, block_size, ...] each, row-contiguous, any dtype: keys, values, scales.
        sources: [P] integers on the host.
        targets: [P] distinct integers. No block may be both source and target, because copies run
            in any order.
        after: fences of earlier dispatches.

    Returns:
        [8] uint32, the fence of the last pool's copies, which run after those of other pools.

    Raises:
        ValueError: blocks are invalid or outside a pool.
    """
    _check_blocks("sources", sources, pools)
    _check_blocks("targets", targets, pools)
    if len(sources) != len(targets):
        raise ValueError(f"targets: expected {len(sources)} as sources, found {len(targets)}")
    if len(np.unique(targets)) != len(targets):
        raise ValueError("targets: a block is named twice")
    both = np.intersect1d(sources, targets)
    if both.size:
        raise ValueError(f"targets: block {both[0]} is also one of sources")
    return _each(pools, sources, targets, after, is_copy=True)


def zero(pools: Sequence[mx.array], blocks: np.ndarray, after: Sequence[mx.array] = ()) -> mx.array:
    """Clears [P] blocks in place; arguments and fence as for `copy`. Blocks may repeat."""
    _check_blocks("blocks", blocks, pools)
    blocks = np.unique(blocks)
    return _each(pools, blocks, blocks, after, is_copy=False)


def _check_blocks(name: str, blocks: np.ndarray, pools: Sequence[mx.array]) -> None:
    if blocks.ndim != 1 or not np.issubdtype(blocks.dtype, np.integer):
        raise ValueError(
            f"{name}: expected a flat array of integers, found {blocks.shape} {blocks.dtype}"
        )
    if pools:
        op_common.check_blocks(name, blocks, min(pool.shape[1] for pool in pools))


def _each(
    pools: Sequence[mx.array],
    sources: np.ndarray,
    targets: np.ndarray,
    after: Sequence[mx.array],
    is_copy: bool,
) -> mx.array:
    fence = op_common.merged(after)
    if len(targets) == 0:
        return fence
    source, target = (
        op_common.padded(mx.array(blocks.astype(np.int32)), fill=0) for blocks in (sources, targets)
    )
    for pool in pools:
        size = math.prod(pool.shape[2:])
        run = math.gcd(size, _RUN_BYTES // pool.dtype.size)
        (fence,) = _KERNEL(
            inputs=[pool, source, target, *op_common.fences([fence])],
            template=[("T", pool.dtype), ("SIZE", size), ("RUN", run), ("COPY", is_copy)],
            grid=(size // run, len(targets), pool.shape[0]),
            threadgroup=(min(_THREADS, size // run), 1, 1),
            output_shapes=[op_common.FENCE_SHAPE],
            output_dtypes=[op_common.FENCE_DTYPE],
        )
    return fence
