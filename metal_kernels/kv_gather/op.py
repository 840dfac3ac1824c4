# SPDX-License-Identifier: Apache-2.0
"""gather() reads contexts from the pool, decoded for MLX's attention: checks and grid."""

import functools
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_kernels import kernel, op_common

_THREADS = 256  # per threadgroup
_BYTES = 16  # of a pool row, per thread
_KERNEL = kernel.load(
    Path(__file__).with_name("kv_gather.metal"),
    input_names=("pool", "scales", "block_table", "bounds", "heads", "after_0", "after_1"),
    output_names=("context", "fence"),
    shared=("numeric.metal",),
)


def gather(
    pool: mx.array,
    block_table: mx.array,
    dtype: mx.Dtype,
    after: Sequence[mx.array] = (),
    scales: mx.array | None = None,
    bounds: mx.array | None = None,
    heads: tuple[int, int] | None = None,
) -> tuple[mx.array, mx.array]:
    """Reads the contexts of n requests, W blocks each, from a pool.

    Args:
        pool: [Hkv, B, block_size, D] float16, bfloat16 or float32, or quantized: uint8 for fp8
            e4m3, int8 for integers. A row has a multiple of 16 bytes.
        block_table: [n, W] int32; blocks outside the pool, such as -1, read as zeros.
        dtype: dtype of the context: float16, bfloat16 or float32.
        after: fences of dispatches to wait for.
        scales: [Hkv, B, block_size] bfloat16 of a quantized pool: value = quantized * scale.
        bounds: [n, 2] int32, first slot to read in each request's context, and one past the last;
            other slots read as zeros, even if they hold NaN. None: read all.
        heads: first head and number of heads H; None: all heads of the pool.

    Returns:
        context: [H, n, W * block_size, D] of `dtype`.
        fence: [8] uint32, for writes that must wait for this read.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    first, count = heads or (0, len(pool))
    _check(pool, block_table, dtype, scales, bounds, (first, count))
    (_, _, block_size, head_size), (n, w) = pool.shape, block_table.shape
    shape = (count, n, w * block_size, head_size)
    if n * w == 0:
        return mx.zeros(shape, dtype), op_common.merged(after)
    bounds = _full_bounds(n, w * block_size) if bounds is None else bounds
    run = _BYTES // pool.dtype.size
    runs = block_size * head_size // run
    context, fence = _KERNEL(
        inputs=[
            pool,
            op_common.NO_SCALES if scales is None else scales,
            op_common.padded(block_table.flatten(), fill=-1),
            op_common.padded(bounds.flatten(), fill=0),
            _heads(first, count),
            *op_common.fences(after),
        ],
        template=[
            ("T", dtype),
            ("C", pool.dtype),
            ("HEAD_SIZE", head_size),
            ("RUN", run),
            ("SAME", dtype == pool.dtype),
        ],
        grid=(runs, w, count * n),
        threadgroup=(min(_THREADS, runs), 1, 1),
        output_shapes=[shape, op_common.FENCE_SHAPE],
        output_dtypes=[dtype, op_common.FENCE_DTYPE],
    )
    return context, fence


def _full_bounds(n: int, num_slots: int) -> mx.array:
    return mx.array(np.tile(np.array([0, num_slots], np.int32), (n, 1)))


@functools.lru_cache(maxsize=256)
def _heads(first: int, count: int) -> mx.array:
    return mx.array(np.array([first, count] + [0] * (kernel.MIN_ELEMENTS - 2), np.int32))


def _check(
    pool: mx.array,
    block_table: mx.array,
    dtype: mx.Dtype,
    scales: mx.array | None,
    bounds: mx.array | None,
    heads: tuple[int, int],
) -> None:
    if pool.ndim != 4 or pool.dtype not in op_common.POOL_DTYPES:
        raise ValueError(
            "pool: expected [Hkv, B, block_size, D] floats, uint8 or int8, "
            f"found {pool.shape} {pool.dtype}"
        )
    if pool.size < kernel.MIN_ELEMENTS or pool.shape[3] * pool.dtype.size % _BYTES:
        raise ValueError(
            f"pool: expected elements in rows of a multiple of {_BYTES} bytes, found {pool.shape} "
            f"{pool.dtype}"
        )
    if block_table.ndim != 2 or block_table.dtype != mx.int32:
        raise ValueError(
            f"block_table: expected [n, W] int32, found {block_table.shape} {block_table.dtype}"
        )
    if dtype not in op_common.VALUE_DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, found {dtype}")
    op_common.check_scales("scales", scales, pool)
    (first, count), num_heads = heads, len(pool)
    if first < 0 or count < 1 or first + count > num_heads:
        raise ValueError(f"heads: expected some of {num_heads}, found {count} from {first} on")
    n = len(block_table)
    if bounds is not None and (bounds.shape != (n, 2) or bounds.dtype != mx.int32):
        raise ValueError(f"bounds: expected ({n}, 2) int32, found {bounds.shape} {bounds.dtype}")
