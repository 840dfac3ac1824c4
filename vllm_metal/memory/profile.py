# SPDX-License-Identifier: Apache-2.0
"""What the scheduler may ask for at most, run once to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_metal.batch.requests import BlockTables
from vllm_metal.batch.rows import Rows
from vllm_metal.kv_cache.formats import pool_dtype
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.stateful_layer import StatefulLayer, StepBounds
from vllm_metal.models.loader import mlx_dtype
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.models.parts import ModelParts
from vllm_metal.sample import Sampler

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def profile_step(
    parts: ModelParts,
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    kv_cache_type: type[LayerKVCache],
) -> None:
    """Runs prompts of max_num_batched_tokens rows, with logits of all that may be sampled.

    The figure of interest is the peak of MLX's memory while it runs; the small pool it needs is
    part of that and gone afterwards.
    """
    largest = LargestStep.of(layers, config, kv_cache_type)
    with largest.caches() as caches:
        # Of all rows nobody holds the hidden states, as in a step.
        hidden_states = largest.rows.of_logits(parts.forward_hidden(largest.rows.input_ids, caches))
    mx.eval(parts.compute_logits(hidden_states))


def profile_layers(
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    kv_cache_type: type[LayerKVCache],
    context: int,
) -> None:
    """Runs one layer of each kind over `context` tokens, in the largest calls a step is made of.

    Only what gathers a context needs more memory for a longer one than `profile_step` had.
    """
    num_tokens, _ = largest_step(config)
    bounds = StepBounds(
        num_tokens, config.scheduler_config.max_num_seqs, config.cache_config.block_size
    )
    dtype = mlx_dtype(config)
    elements = pool_dtype(config.cache_config.cache_dtype, dtype)
    for layer in {layer.kind: layer for layer in layers}.values():
        if layer.gathers(kv_cache_type):
            layer.profile(context, bounds, dtype, elements, kv_cache_type)


def profile_sampling(config: VllmConfig, vocab_size: int, rows: int) -> None:
    """Samples `rows` requests at once, each with the parameters that need the most memory."""
    model = config.model_config
    sampler = Sampler(vocab_size, rows, model.logprobs_mode, model.seed)
    most_logprobs = min(max(model.max_logprobs, 0), vocab_size) or None
    params = SamplingParams(**sampler.heaviest(), logprobs=most_logprobs)
    for req_idx in range(rows):
        sampler.add_request(req_idx, params, [0], [])
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


@dataclass(frozen=True)
class LargestStep:
    """A step of as few prompts as possible, over a small pool of its own."""

    layers: PagedLayers
    rows: Rows  # tokens are zeros, logits those of the rows that are sampled
    block_tables: BlockTables

    @staticmethod
    def of(
        layers: Sequence[StatefulLayer],
        config: VllmConfig,
        kv_cache_type: type[LayerKVCache],
        paced: bool = True,
    ) -> LargestStep:
        """Of one network.

        Args:
            layers: the network's.
            config: vLLM's.
            kv_cache_type: see StatefulLayer.allocate.
            paced: see PagedLayers.
        """
        num_tokens, sampled = largest_step(config)
        block_size = config.cache_config.block_size
        longest = min(num_tokens, config.model_config.max_model_len)
        starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
        num_reqs, width = len(starts) - 1, -(-longest // block_size)
        tables = BlockTables(1, num_reqs, width)
        for req_idx in range(num_reqs):
            tables.replace(req_idx, [range(req_idx * width, (req_idx + 1) * width)])
        positions = np.arange(num_tokens, dtype=np.int32) % longest
        rows = Rows(
            req_indices_np=np.arange(num_reqs, dtype=np.int32),
            query_start_loc_np=starts,
            seq_lens_np=np.diff(starts),
            positions_np=positions,
            positions=mx.array(positions),
            input_ids=mx.zeros(num_tokens, mx.int32),
            logits_indices=sampled,
        )
        elements = pool_dtype(config.cache_config.cache_dtype, mlx_dtype(config))
        states = {
            layer.name: layer.allocate(num_reqs * width, block_size, elements, kv_cache_type)
            for layer in layers
        }
        group_of = dict.fromkeys(states, 0)
        paged = PagedLayers(layers, states, group_of, block_size, paced)
        return LargestStep(paged, rows, tables)

    def caches(self) -> AbstractContextManager[list[Any]]:
        """The layers' caches, for a forward of the rows; see PagedLayers.step."""
        return self.layers.step(self.rows, self.block_tables)
