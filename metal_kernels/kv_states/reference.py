# SPDX-License-Identifier: Apache-2.0
"""kv_states with MLX's operations."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import BITS, block_elements


def read(pools: Sequence[mx.array], blocks: mx.array, width: int, split: int = 1) -> mx.array:
    """Returns [n, width] states, as `kv_states.read` does."""
    bits = BITS[pools[0].dtype.size]
    if split > 1:
        blocks = (blocks[:, None] * split + mx.arange(split, dtype=blocks.dtype)).flatten()
    found = []
    for start, pool in _used(pools, width, split):
        taken = mx.take(pool.view(bits), blocks, axis=1)
        heads, num_parts, *part = taken.shape
        of_block = taken.reshape(heads, num_parts // split, split * math.prod(part))
        found.append(of_block.swapaxes(0, 1).flatten(1)[:, : width - start])
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


def write(
    pools: Sequence[mx.array], blocks_np: np.ndarray, states: mx.array, split: int = 1
) -> None:
    """Writes as `kv_states.write` does; clears the rest of a block."""
    # MLX's scatter is in place if nothing else holds the pools' memory.
    width = states.shape[1]
    parts_np = blocks_np[:, None].astype(np.int32) * split + np.arange(split, dtype=np.int32)
    rows = mx.array(parts_np.ravel())
    for start, pool in _used(pools, width, split):
        heads, _, *part = pool.shape
        per_block = block_elements(pool, split)
        content = states[:, start : start + per_block]
        missing = per_block - content.shape[1]
        content = mx.pad(content, [(0, 0), (0, missing)]) if missing else content
        content = content.reshape(len(blocks_np), heads, split, *part)
        pool[:, rows] = content.swapaxes(0, 1).flatten(1, 2).view(pool.dtype)


def _used(pools: Sequence[mx.array], width: int, split: int) -> list[tuple[int, mx.array]]:
    """Returns the pools that hold states, and the first element of a state that each holds."""
    sizes = [block_elements(pool, split) for pool in pools]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(start, pool) for start, pool in zip(starts, pools, strict=True) if start < width]
