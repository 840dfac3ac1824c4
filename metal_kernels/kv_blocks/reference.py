# SPDX-License-Identifier: Apache-2.0
"""kv_blocks with MLX's operations, which return new pools."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def copy(pools: Sequence[mx.array], sources: np.ndarray, targets: np.ndarray) -> list[mx.array]:
    """Returns the pools after `kv_blocks.copy`."""
    source, target = mx.array(sources.astype(np.int32)), mx.array(targets.astype(np.int32))
    copied = [mx.array(pool) for pool in pools]
    for pool in copied:
        pool[:, target] = pool[:, source]
    return copied


def zero(pools: Sequence[mx.array], blocks: np.ndarray) -> list[mx.array]:
    """Returns the pools after `kv_blocks.zero`."""
    target = mx.array(blocks.astype(np.int32))
    cleared = [mx.array(pool) for pool in pools]
    for pool in cleared:
        pool[:, target] = 0
    return cleared
