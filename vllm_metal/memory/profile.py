# SPDX-License-Identifier: Apache-2.0
"""What the scheduler may ask for at most, run once to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from vllm import SamplingParams

from metal_kernels.paged_attention import reference
from vllm_metal.attention.layers import AttentionLayer
from vllm_metal.kv_cache.formats import pool_dtype
from vllm_metal.kv_cache.layer_cache import LayerKVCache, StepLayout
from vllm_metal.attention.paged_cache import AttentionMetadata, PagedCache
from vllm_metal.models.loader import mlx_dtype
from vllm_metal.models.parts import SelectedRows
from vllm_metal.sample import Sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def profile_step(
    model: nn.Module,
    rows: SelectedRows,
    layers: Sequence[AttentionLayer],
    config: VllmConfig,
    kv_cache_type: type[LayerKVCache],
) -> None:
    """Runs prompts of max_num_batched_tokens rows, with logits of all that may be sampled.

    The figure of interest is the peak of MLX's memory while it runs; the small pool it needs is
    part of that and gone afterwards.
    """
    num_tokens, sampled = largest_step(config)
    caches = largest_caches(layers, config, kv_cache_type)
    mx.eval(rows.logits(model, mx.zeros(num_tokens, mx.int32), caches, sampled))


def profile_attention(
    layers: Sequence[AttentionLayer],
    config: VllmConfig,
    kv_cache_type: type[LayerKVCache],
    context: int,
) -> None:
    """Runs one layer of each kind over `context` tokens, in the largest calls a step is made of.

    Only a kv_cache that gathers needs more memory for a longer context than `profile_step` had. Its
    calls are bounded (metal_kernels.paged_attention.reference), so this finds the most of any.
    """
    block_size = config.cache_config.block_size
    num_tokens, _ = largest_step(config)
    chunk = min(num_tokens, context, max(reference.MAX_SCORES // context, reference.MIN_ROWS))
    many = min(config.scheduler_config.max_num_seqs, max(reference.MAX_GATHERED // context, 1))
    dtype = mlx_dtype(config)
    elements = pool_dtype(config.cache_config.cache_dtype, dtype)
    for num_reqs, num_rows in ((1, chunk), (many, 1)):
        # Everything lies in block 0, except for the blocks that are written.
        written = -(-num_rows // block_size) + 1
        table = np.zeros((num_reqs, -(-context // block_size)), np.int32)
        own = 1 + np.arange(num_reqs * written, dtype=np.int32).reshape(num_reqs, written)
        table[:, -written:] = own[:, -table.shape[1] :]
        starts = np.arange(num_reqs + 1, dtype=np.int32) * num_rows
        positions = np.arange(context - num_rows, context)
        slots = table[:, positions // block_size] * block_size + positions % block_size
        seq_lens = np.full(num_reqs, context, np.int32)
        layout = StepLayout(starts, seq_lens, table, slots.ravel().astype(np.int32), block_size)
        for shape, window in {(layer.shape, layer.window): None for layer in layers}:
            plan = kv_cache_type.plan(layout, shape, window)
            heads = (shape.num_kv_heads, shape.head_size)
            kv_cache = kv_cache_type(int(own.max()) + 1, block_size, *heads, elements)
            fresh = mx.zeros((num_reqs * num_rows, *heads), dtype)
            keys, values = kv_cache.write(plan, fresh, fresh)
            queries = mx.zeros((len(fresh), shape.num_heads, shape.head_size), dtype)
            mx.eval(kv_cache.attend(plan, queries, keys, values, 1.0, None))


def profile_sampling(config: VllmConfig, vocab_size: int, rows: int) -> None:
    """Samples `rows` requests at once that ask for all the sampler has to offer."""
    model = config.model_config
    sampler = Sampler(vocab_size, rows, model.logprobs_mode, model.seed)
    wanted = min(max(model.max_logprobs, 0), vocab_size) or None
    params = SamplingParams(
        top_p=0.9,
        min_p=0.01,
        seed=0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logprobs=wanted,
    )
    for req_idx in range(rows):
        sampler.add(req_idx, params, [0], [])
    logits = mx.zeros((rows, vocab_size), mlx_dtype(config))
    sampled = sampler.sample(logits, np.arange(rows), np.zeros(rows, np.int32))
    mx.eval(sampled.token_ids, sampled.logprobs.arrays() if sampled.logprobs else ())


def largest_step(config: VllmConfig) -> tuple[int, mx.array]:
    """Rows of the largest step, and which of them are sampled ([N] int32)."""
    scheduler = config.scheduler_config
    most = scheduler.max_num_seqs * config.model_config.max_model_len
    num_tokens = min(scheduler.max_num_batched_tokens, most)
    return num_tokens, mx.arange(min(most_sampled(config), num_tokens), dtype=mx.int32)


def most_sampled(config: VllmConfig) -> int:
    """Rows that are sampled in a step, at most: a request's newest token, and its drafts."""
    scheduler, speculation = config.scheduler_config, config.speculative_config
    drafts = speculation.num_speculative_tokens if speculation is not None else 0
    return min(scheduler.max_num_seqs * (1 + drafts), scheduler.max_num_batched_tokens)


def largest_caches(
    layers: Sequence[AttentionLayer], config: VllmConfig, kv_cache_type: type[LayerKVCache]
) -> list[PagedCache]:
    """The layers' caches over a pool of their own, in a step of as few prompts as possible."""
    num_tokens, _ = largest_step(config)
    block_size = config.cache_config.block_size
    longest = min(num_tokens, config.model_config.max_model_len)
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    width = -(-longest // block_size)
    num_blocks = width * (len(starts) - 1)
    table = np.arange(num_blocks, dtype=np.int32).reshape(-1, width)
    request, position = np.divmod(np.arange(num_tokens, dtype=np.int32), longest)
    slots = request * width * block_size + position
    layout = StepLayout(starts, np.diff(starts), table, slots, block_size)
    positions = mx.array(position)
    metadata = {
        kind: AttentionMetadata(positions, kv_cache_type.plan(layout, *kind))
        for kind in {(layer.shape, layer.window) for layer in layers}
    }
    caches = []
    dtype = pool_dtype(config.cache_config.cache_dtype, mlx_dtype(config))
    for layer in layers:
        kv_cache = kv_cache_type(num_blocks, block_size, layer.num_kv_heads, layer.head_size, dtype)
        caches.append(PagedCache(kv_cache))
        caches[-1].begin_step(metadata[layer.shape, layer.window])
    return caches
