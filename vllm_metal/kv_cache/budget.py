# SPDX-License-Identifier: Apache-2.0
"""How many bytes the KV pool may take, from what is free after weights and a profiled peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from vllm.logger import init_logger

from vllm_metal import device
from vllm_metal.attention.paged_cache import PagedCache
from vllm_metal.envs import Device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.models.layers import AttentionLayer
    from vllm_metal.models.loader import SelectedRows

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


def profile_step(
    model: nn.Module,
    rows: SelectedRows,
    layers: Sequence[AttentionLayer],
    config: VllmConfig,
    dtype: mx.Dtype,
) -> None:
    """Runs a step of max_num_batched_tokens rows and max_num_seqs sampled tokens."""
    from metal_kernels import paged_attention
    from vllm_metal.attention.paged_cache import AttentionMetadata
    from vllm_metal.kv_cache.pool import Region

    scheduler, block_size = config.scheduler_config, config.cache_config.block_size
    num_tokens = min(scheduler.max_num_batched_tokens, config.model_config.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    starts = np.array([0, num_tokens], np.int32)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    slots = np.arange(num_tokens, dtype=np.int32)
    metadata = {
        window: AttentionMetadata(
            mx.array(slots),
            mx.array(slots),
            paged_attention.plan(starts, starts[1:], table, slots, block_size, window),
        )
        for window in {layer.window for layer in layers}
    }
    caches = []
    for layer in layers:
        region = Region(num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype)
        caches.append(PagedCache(region))
        caches[-1].begin_step(metadata[layer.window])
    sampled = mx.arange(min(scheduler.max_num_seqs, num_tokens), dtype=mx.int32)
    mx.eval(rows.logits(model, mx.zeros(num_tokens, mx.int32), caches, sampled))
