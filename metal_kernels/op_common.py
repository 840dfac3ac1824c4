# SPDX-License-Identifier: Apache-2.0
"""Shares dtypes, checks, fences and padding between ops on a KV pool.

A kernel that writes to a pool takes the pool as an input. MLX does not copy inputs, and does not
see dependencies through them. Explicit fences order writes and reads: small arrays that every
kernel on the pool returns and the next one takes. MLX binds each input even if unused, and makes a
dispatch wait for the one that wrote it.
"""

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal_kernels import command_buffers
from metal_kernels.kernel import MIN_ELEMENTS

command_buffers.raise_limit()  # before the arrays below

VALUE_DTYPES = (mx.float16, mx.bfloat16, mx.float32)
QUANTIZED_DTYPES = (mx.uint8, mx.int8)  # fp8 e4m3, integers; with scales
POOL_DTYPES = VALUE_DTYPES + QUANTIZED_DTYPES
#: Unsigned integers by element size in bytes, to hold the bits of any dtype.
BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
SCALE_DTYPE = mx.bfloat16  # quantization uses the rounded scale, so this costs no accuracy
#: Bound instead of scales if a pool is not quantized.
NO_SCALES = mx.array([0.0] * MIN_ELEMENTS, SCALE_DTYPE)

FENCE_SHAPE, FENCE_DTYPE = (MIN_ELEMENTS,), mx.uint32
_NOTHING_BEFORE = mx.array(np.zeros(FENCE_SHAPE, np.uint32))


def fences(after: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    """Merges `after` into two fences, [8] uint32 each, because kernels bind exactly two.

    Raises ValueError: an array of `after` is not a fence.
    """
    for fence in after:
        if fence.shape != FENCE_SHAPE or fence.dtype != FENCE_DTYPE:
            raise ValueError(
                f"after: expected fences, {FENCE_SHAPE} {FENCE_DTYPE} arrays, "
                f"found {fence.shape} {fence.dtype}"
            )
    first = after[0] if after else _NOTHING_BEFORE
    return first, functools.reduce(mx.add, after[1:]) if len(after) > 1 else _NOTHING_BEFORE


def merged(after: Sequence[mx.array]) -> mx.array:
    """Merges `after` into one fence, [8] uint32."""
    first, second = fences(after)
    return first if second is _NOTHING_BEFORE else first + second


def padded(metadata: mx.array, fill: int) -> mx.array:
    """Pads flat `metadata` with `fill` to at least MIN_ELEMENTS."""
    missing = MIN_ELEMENTS - metadata.size
    return metadata if missing <= 0 else mx.pad(metadata, (0, missing), constant_values=fill)


def block_elements(pool: mx.array, split: int = 1) -> int:
    """Returns the elements of a block of a [Hkv, B * split, ...] pool, over all heads and parts."""
    return pool.size // pool.shape[1] * split


def check_scales(name: str, scales: mx.array | None, pool: mx.array) -> None:
    """Raises ValueError unless a quantized pool has scales of its shape, and other pools none."""
    if pool.dtype not in QUANTIZED_DTYPES:
        if scales is not None:
            raise ValueError(f"{name}: expected None for a pool of {pool.dtype}")
    elif scales is None or scales.shape != pool.shape[:3] or scales.dtype != SCALE_DTYPE:
        found = "None" if scales is None else f"{scales.shape} {scales.dtype}"
        raise ValueError(f"{name}: expected {pool.shape[:3]} bfloat16, found {found}")


def check_blocks(name: str, blocks_np: np.ndarray, num_blocks: int) -> None:
    """Raises ValueError for blocks outside the pool: MLX and kernels do not check indices."""
    outside = blocks_np[(blocks_np < 0) | (blocks_np >= num_blocks)]
    if outside.size:
        raise ValueError(f"{name}: block {outside[0]} is not one of the pool's {num_blocks}")
