# SPDX-License-Identifier: Apache-2.0
"""How many bytes the KV pool may take, from what is free after weights and a profiled peak."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from vllm.logger import init_logger

from vllm_metal import device
from vllm_metal.envs import Device

logger = init_logger(__name__)

GIB = 2**30
#: The CPU device shares memory with everything else on the machine and is for trying things out,
#: so it takes this much and no more unless --kv-cache-memory-bytes says otherwise.
CPU_POOL_LIMIT = 4 * GIB
#: A layer's attention gathers the batch's whole context, padded to at most twice, and may lay it
#: out anew for the matrix product: at worst four times one layer's share of a full pool.
GATHER_FACTOR = 4


class BudgetError(ValueError):
    """No memory is left for a KV pool; the message holds the sum."""


def available_for_pool(
    kind: Device, utilization: float, num_layers: int, profile: Callable[[], None]
) -> int:
    """Bytes for the pool: the device's share, less weights, less the peak of a full step.

    Args:
        kind: the MLX device.
        utilization: ``--gpu-memory-utilization``, the share of the device's memory to use in all.
        num_layers: attention layers, of which one at a time gathers its context from the pool.
        profile: runs the largest step, whose peak above what was active is set aside.

    Raises:
        BudgetError: nothing is left.
    """
    before = device.memory(kind)
    mx.reset_peak_memory()
    profile()
    peak = max(mx.get_peak_memory() - before.active, 0)
    mx.clear_cache()
    now = device.memory(kind)
    share = int(now.total * utilization) - now.active
    left = min(share, now.available) - peak
    figures = (
        f"{now.total / GIB:.2f} GiB in all x --gpu-memory-utilization {utilization} - weights "
        f"{now.active / GIB:.2f} - peak of a full step {peak / GIB:.2f}, and "
        f"{now.available / GIB:.2f} GiB are free now"
    )
    if left <= 0:
        raise BudgetError(
            f"no memory is left for the KV cache: {figures}. Raise --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, close other programs, or choose a smaller model"
        )
    pool = int(left / (1 + GATHER_FACTOR / num_layers))
    if kind == "cpu":
        pool = min(pool, CPU_POOL_LIMIT)
    logger.info("KV pool: %.2f GiB (%s)", pool / GIB, figures)
    return pool
