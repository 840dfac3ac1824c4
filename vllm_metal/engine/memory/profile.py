# SPDX-License-Identifier: Apache-2.0
"""Runs the largest steps and calls that a scheduler can request, to measure their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.formats import pool_dtype
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer, StepBounds
from vllm_metal.engine.memory.budget import StepStates
from vllm_metal.engine.models.loader import mlx_dtype
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.sample import Sampler
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: Requests measured while decoding: with a single one, some operations need less memory.
DRAFTED = 2


def profile_step(
    parts: ModelParts,
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    backend: KVBackend,
    extras: Callable[[Rows], Mapping[str, mx.array]] = lambda rows: {},
) -> None:
    """Runs prompts of max_num_batched_tokens tokens, with logits for as many as may be sampled.

    The step's small pool counts towards the peak and is freed afterwards. `extras` returns
    further inputs of the model's modules.
    """
    step = LargestStep.of(layers, config, backend)
    _run(parts, step, extras(step.rows))


def requests_profile(
    parts: ModelParts,
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    backend: KVBackend,
    drafts: int,
) -> Callable[[], None]:
    """Allocates a pool; returns a function that runs two decode steps (see `drafted`) on it.

    The second step starts with the first one's states and draft inputs, and keeps as many itself.
    """
    step = LargestStep.of(layers, config, backend, drafts)
    mx.eval(step.layers.pool_arrays())

    def run() -> None:
        _run(parts, step)
        _run(parts, step.next())

    return run


def _run(
    parts: ModelParts, step: LargestStep, extras: Mapping[str, mx.array] | None = None
) -> None:
    inputs = step.rows.inputs.with_extras(extras or {})
    with step.caches() as caches:
        # The hidden states are not kept in a variable, as in a step.
        results = step.results(parts, parts.forward_hidden(inputs, caches))
    mx.eval(results)


def profile_layers(
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    backend: KVBackend,
    context: int,
) -> None:
    """Runs one layer of each kind over `context` tokens, in a step's largest calls.

    Only layers that gather a context need more memory than in `profile_step`.
    """
    num_tokens, _ = largest_step(config)
    bounds = StepBounds(
        num_tokens, config.scheduler_config.max_num_seqs, config.cache_config.block_size
    )
    dtype = mlx_dtype(config)
    elements = pool_dtype(config.cache_config.cache_dtype, dtype)
    for layer in {layer.kind: layer for layer in layers}.values():
        if layer.gathers(backend):
            layer.profile(context, bounds, dtype, elements, backend)


def profile_sampling(config: VllmConfig, vocab_size: int, rows: int) -> None:
    """Samples `rows` requests at once with the parameters that need the most memory."""
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
    """Tokens of the largest step, and the indices of those that are sampled ([N] int32)."""
    scheduler = config.scheduler_config
    most = scheduler.max_num_seqs * config.model_config.max_model_len
    num_tokens = min(scheduler.max_num_batched_tokens, most)
    return num_tokens, mx.arange(min(most_sampled(config), num_tokens), dtype=mx.int32)


def most_sampled(config: VllmConfig) -> int:
    """Maximum logits rows sampled in a step: each request's newest token and its drafts."""
    scheduler = config.scheduler_config
    return min(scheduler.max_num_seqs * (1 + num_drafts(config)), scheduler.max_num_batched_tokens)


def drafted(config: VllmConfig) -> tuple[int, int]:
    """Number of requests to measure while decoding, and the most drafts of each."""
    # A request takes as much however many there are, and the states of the maximum number might
    # exceed the device's memory.
    scheduler = config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    drafts = min(num_drafts(config), tokens - 1)
    return max(min(DRAFTED, scheduler.max_num_seqs, tokens // (1 + drafts)), 1), drafts


def num_drafts(config: VllmConfig) -> int:
    """Maximum drafts of a request in a step."""
    speculation = config.speculative_config
    return speculation.num_speculative_tokens if speculation is not None else 0


@dataclass(frozen=True)
class LargestStep:
    """The largest step that vLLM may schedule, to measure its memory; it has a pool of its own."""

    layers: PagedLayers
    rows: Rows  # all token ids are 0; logits of the sampled rows
    block_tables: BlockTables
    pools: bool = False  # whether a pooler needs all hidden states, instead of logits

    @staticmethod
    def of(
        layers: Sequence[StatefulLayer],
        config: VllmConfig,
        backend: KVBackend,
        drafts: int | None = None,  # per request after a one-token context; None: prompts only
        paced: bool = True,
        num_reqs: int | None = None,  # with `drafts`; None: those of `drafted`
    ) -> LargestStep:
        """Builds a step of as few prompts as possible, or, with `drafts`, of decoding requests."""
        if drafts is None:
            num_tokens, sampled = largest_step(config)
            longest = min(num_tokens, config.model_config.max_model_len)
            counts = np.diff(np.append(np.arange(0, num_tokens, longest), num_tokens))
        else:
            requests = num_reqs or drafted(config)[0]
            counts = np.full(requests, 1 + drafts)
            sampled = mx.arange(requests * (1 + drafts), dtype=mx.int32)
        block_size = config.cache_config.block_size
        begin, num_reqs = 0 if drafts is None else 1, len(counts)
        starts = np.append(0, np.cumsum(counts)).astype(np.int32)
        lengths = begin + np.diff(starts)
        longest = int(lengths.max()) + (0 if drafts is None else 1 + drafts)  # in the next step
        width = -(-longest // block_size)
        num_blocks = begin + num_reqs * width
        tables = BlockTables(1, num_reqs, width)
        for req_idx in range(num_reqs):
            first = begin + req_idx * width  # block 0 does not hold a request's states
            tables.replace(req_idx, [range(first, first + width)])
        offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        positions = (begin + offsets).astype(np.int32)
        rows = Rows(
            req_indices_np=np.arange(num_reqs, dtype=np.int32),
            query_start_loc_np=starts,
            seq_lens_np=lengths,
            positions_np=positions,
            positions=mx.array(positions),
            input_ids=mx.zeros(len(positions), mx.int32),
            logits_indices=sampled,
            num_drafts_np=None if drafts is None else np.full(num_reqs, drafts, np.int32),
        )
        elements = pool_dtype(config.cache_config.cache_dtype, mlx_dtype(config))
        states = {
            layer.name: layer.allocate(num_blocks, block_size, elements, backend)
            for layer in layers
        }
        paged = PagedLayers(layers, states, dict.fromkeys(states, 0), block_size, paced)
        return LargestStep(paged, rows, tables, pools(config))

    def results(self, parts: ModelParts, hidden_states: mx.array) -> mx.array:
        """Lazy [N, V] logits of sampled rows, or [T, H] float32 for a pooler of all rows."""
        if self.pools:
            return hidden_states[:, 0].astype(mx.float32)
        return parts.compute_logits(self.rows.of_logits(hidden_states))

    def caches(self) -> AbstractContextManager[list[Any]]:
        """The layers' caches for a forward pass; see PagedLayers.step."""
        return self.layers.step(self.rows, self.block_tables)

    def next(self) -> LargestStep:
        """The following step, as if all drafts of this one were accepted.

        Call it after this step's forward is built.
        """
        rows = self.rows
        starts = rows.query_start_loc_np
        counts = np.diff(starts)
        self.layers.record_accepted(rows, starts[1:] - 1)
        positions = rows.positions_np + np.repeat(counts, counts)
        following = replace(
            rows,
            query_start_loc_np=starts.copy(),  # a step is identified by this array
            seq_lens_np=rows.seq_lens_np + counts,
            positions_np=positions,
            positions=mx.array(positions),
        )
        return replace(self, rows=following)


@dataclass(frozen=True)
class LargestCalls:
    """The largest attention and sampling calls of a step, run once to measure their memory."""

    attention: Callable[[int], None] | None  # over a context of n tokens; None: nothing to add
    sampling: Callable[[int], None] | None  # samples n rows; None: no sampling
    vocab_size: int  # 0: nothing is sampled
    most_sampled: int  # rows of a step
    logit_bytes: int  # bytes per logit
    drafted: tuple[int, int] = (1, 0)  # see `drafted`
    keeps_states: bool = False  # whether any layer is recurrent

    @staticmethod
    def of(
        config: VllmConfig,
        layers: Sequence[StatefulLayer],
        backend: KVBackend,
        vocab_size: int,
    ) -> LargestCalls:
        """Builds the calls for this process's layers; `vocab_size` 0 if it samples nothing."""
        samples = vocab_size > 0 and not pools(config)
        gathers = any(layer.gathers(backend) for layer in layers)
        return LargestCalls(
            partial(profile_layers, layers, config, backend) if gathers else None,
            partial(profile_sampling, config, vocab_size) if samples else None,
            vocab_size if samples else 0,
            most_sampled(config),
            mlx_dtype(config).size,
            drafted(config),
            any(layer.state_bytes for layer in layers),
        )

    def step_states(self, peaks: Peaks, num_tokens: int) -> StepStates | None:
        """Memory of requests and drafts besides their tokens; None without recurrent layers.

        A step's memory is estimated as that of a forward of `num_tokens` prompt tokens, plus what
        each request and each draft takes more than a prompt token. A request's memory is a maximum
        of linear functions of its number of drafts, so the line between none and all is a bound.
        """
        if not self.keeps_states:
            return None
        requests, drafts = self.drafted
        row = peaks.forward // num_tokens
        draft_peak = peaks.drafts - peaks.requests
        return StepStates(
            max(-(-peaks.requests // requests) - row, 0),
            max(-(-draft_peak // (requests * drafts)) - row, 0) if drafts else 0,
        )


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of forward passes."""

    forward: int  # step of max_num_batched_tokens prompt tokens
    requests: int = 0  # two steps of the requests of `drafted`, without drafts
    drafts: int = 0  # those two steps with the maximum number of drafts
