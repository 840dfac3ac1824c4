# SPDX-License-Identifier: Apache-2.0
"""The largest step the scheduler may ask for, run once to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.attention.paged_cache import AttentionMetadata, PagedCache
from vllm_metal.kv_cache.region import Region, StepLayout
from vllm_metal.models.layers import AttentionLayer
from vllm_metal.models.loader import SelectedRows, mlx_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def profile_step(
    model: nn.Module,
    rows: SelectedRows,
    layers: Sequence[AttentionLayer],
    config: VllmConfig,
    region_type: type[Region],
) -> None:
    """Runs one prompt of max_num_batched_tokens rows, with logits for max_num_seqs of them.

    The figure of interest is the peak of MLX's memory while it runs; the small pool it needs is
    part of that and gone afterwards.
    """
    num_tokens, sampled = largest_step(config)
    caches = largest_caches(layers, config, region_type)
    mx.eval(rows.logits(model, mx.zeros(num_tokens, mx.int32), caches, sampled))


def largest_step(config: VllmConfig) -> tuple[int, mx.array]:
    """Rows of the largest step, and which of them are sampled ([N] int32)."""
    scheduler = config.scheduler_config
    num_tokens = min(scheduler.max_num_batched_tokens, config.model_config.max_model_len)
    return num_tokens, mx.arange(min(scheduler.max_num_seqs, num_tokens), dtype=mx.int32)


def largest_caches(
    layers: Sequence[AttentionLayer], config: VllmConfig, region_type: type[Region]
) -> list[PagedCache]:
    """The layers' caches over a pool of their own, in a step of one prompt."""
    num_tokens, _ = largest_step(config)
    block_size = config.cache_config.block_size
    num_blocks = -(-num_tokens // block_size)
    starts = np.array([0, num_tokens], np.int32)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    slots = np.arange(num_tokens, dtype=np.int32)
    layout = StepLayout(starts, starts[1:], table, slots, block_size)
    positions = mx.array(slots)
    metadata = {
        kind: AttentionMetadata(positions, region_type.plan(layout, *kind))
        for kind in {(layer.shape, layer.window) for layer in layers}
    }
    caches = []
    dtype = mlx_dtype(config)
    for layer in layers:
        region = region_type(num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype)
        caches.append(PagedCache(region))
        caches[-1].begin_step(metadata[layer.shape, layer.window])
    return caches
