# SPDX-License-Identifier: Apache-2.0
"""Serves a made-up request, so that the first real one finds everything compiled.

MLX compiles a graph's fused kernels when the device first gets it, and a forward is compiled to a
graph at the second step of its shapes (see models.compiled): the first request's second token would
wait for both. The log-probabilities or hidden states of the made-up request also show whether the
model is served correctly (see models.dense_check).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_metal.engine.models.dense_check import PagedHidden, PagedLogits
from vllm_metal.engine.pooling.pooling_head import PoolingHead
from vllm_metal.engine.worker.results import Step
from vllm_metal.engine.worker.sampling_head import SamplingHead

if TYPE_CHECKING:
    from vllm.config.pooler import PoolerConfig

    from vllm_metal.engine.sample import Sampler
    from vllm_metal.engine.worker.model_runner import ModelRunner

REQ_ID = "vllm-metal-warm-up"
#: Prompt tokens, in two chunks if there is room.
NUM_PROMPT_TOKENS, FIRST_CHUNK = 8, 5
#: The first decode step shows a shape, the second one traces and compiles it. A draft network's
#: passes are one step behind.
NUM_DECODE_STEPS, NUM_DECODE_STEPS_WITH_DRAFTS = 2, 3


@dataclass(frozen=True)
class Room:
    """The engine's capacity for the made-up request."""

    num_groups: int  # KV cache groups
    block_size: int  # tokens of a block
    num_blocks: int  # blocks in the pool
    max_model_len: int  # longest request in tokens

    @property
    def num_tokens(self) -> int:
        most = (self.num_blocks - 1) // self.num_groups * self.block_size  # block 0 is vLLM's own
        return min(self.max_model_len, most)

    def blocks(self, num_tokens: int) -> tuple[list[int], ...]:
        """Block ids of each KV cache group for `num_tokens`."""
        count = -(-num_tokens // self.block_size)
        starts = [1 + group * count for group in range(self.num_groups)]
        return tuple(list(range(start, start + count)) for start in starts)


def run_warm_up(
    runner: ModelRunner,
    sampler: Sampler,
    sampling: Mapping[str, Any],
    vocab_size: int,
    room: Room,
) -> PagedLogits:
    """Computes a short prompt and decode steps, fewer if there is no room, and waits for them.

    Leaves the runner and the pool as they were.

    Args:
        runner: has no requests and no steps in flight.
        sampler: returns the model's own log-probabilities, without the user's logits processors,
            which must not see this request.
        sampling: default sampling parameters by name.
        vocab_size: bounds the token ids.
        room: the engine's capacity.
    """
    with_drafts, rows = runner.num_drafts > 0, 1 + runner.num_drafts
    num_steps = NUM_DECODE_STEPS_WITH_DRAFTS if with_drafts else NUM_DECODE_STEPS
    num_tokens = min(NUM_PROMPT_TOKENS + num_steps * rows, room.num_tokens)
    warm_up_runner = runner.for_warm_up(partial(SamplingHead, sampler=sampler))
    with _request(warm_up_runner, vocab_size, num_tokens, room) as request:
        settings = {**sampling, "logprobs": 0, "prompt_logprobs": 0}
        request.read_prompt(SamplingParams.from_optional(**settings))
        while num_steps and request.num_computed + rows <= num_tokens:
            request.decode(rows)
            num_steps -= 1
        request.runner.process_outputs()
    return PagedLogits(request.token_ids, request.logprobs)


def run_pooling_warm_up(
    runner: ModelRunner, config: PoolerConfig, vocab_size: int, room: Room
) -> PagedHidden:
    """Computes a short prompt on a pooling engine; see `run_warm_up`."""
    from vllm_metal.engine.pooling.all_rows import AllRows  # imports vLLM's poolers

    end = partial(PoolingHead, AllRows(), config)
    warm_up_runner = runner.for_warm_up(lambda model, requests: end(requests))
    num_tokens = min(NUM_PROMPT_TOKENS, room.num_tokens)
    with _request(warm_up_runner, vocab_size, num_tokens, room) as request:
        request.read_prompt(PoolingParams(task=AllRows.TASK))
    assert request.pooled is not None
    return PagedHidden(request.token_ids, request.pooled)


@contextmanager
def _request(
    runner: ModelRunner, vocab_size: int, num_tokens: int, room: Room
) -> Iterator[_Request]:
    # The request's blocks are cleared afterwards.
    prompt = np.random.default_rng(0).integers(0, vocab_size, NUM_PROMPT_TOKENS)[:num_tokens]
    blocks = room.blocks(num_tokens)
    try:
        yield _Request(runner, prompt.tolist(), blocks)
    finally:
        runner.update_requests(_step({}, finished_req_ids={REQ_ID}))
    runner.layers.update_blocks([block for group in blocks for block in group], ())
    runner.wait()


@dataclass
class _Request:
    """The made-up request; `token_ids` and `logprobs` grow with its steps."""

    runner: ModelRunner
    token_ids: list[int]  # known so far
    blocks: tuple[list[int], ...]
    logprobs: list[float] = field(default_factory=list)  # logprobs of all tokens but the first
    num_computed: int = 0
    pooled: np.ndarray | None = None  # its pooler's result

    def read_prompt(self, params: SamplingParams | PoolingParams) -> None:
        """Computes the prompt in two chunks."""
        prompt = self.token_ids
        first = min(FIRST_CHUNK, len(prompt))
        sampling = params if isinstance(params, SamplingParams) else None
        pooling = params if isinstance(params, PoolingParams) else None
        new = NewRequestData(REQ_ID, list(prompt), [], sampling, pooling, self.blocks, 0, None)
        self._run(_step({REQ_ID: first}, scheduled_new_reqs=[new]), first)
        if rest := len(prompt) - first:
            self._run(_step({REQ_ID: rest}, scheduled_cached_reqs=self._running()), rest)

    def decode(self, rows: int) -> None:
        """Computes one more token of the request, and `rows` - 1 drafts after it."""
        drafts = {REQ_ID: [-1] * (rows - 1)} if rows > 1 else {}  # the runner proposes them
        step = _step(
            {REQ_ID: rows},
            scheduled_cached_reqs=self._running(),
            scheduled_spec_decode_tokens=drafts,
        )
        self._run(step, None)

    def _running(self) -> CachedRequestData:
        return CachedRequestData(
            req_ids=[REQ_ID],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None],
            num_computed_tokens=[self.num_computed],
            num_output_tokens=[0],
        )

    def _run(self, step: SchedulerOutput, computed: int | None) -> None:
        # A decode step computes as many tokens as it samples: `computed` is then None.
        current = Step(step, pool=0)
        self.runner.execute(current)
        result = self.runner.finish(current, None).get_output()
        (sampled,) = result.sampled_token_ids
        if (prompt_logprobs := result.prompt_logprobs_dict.get(REQ_ID)) is not None:
            self.logprobs += prompt_logprobs.logprobs[:, 0].tolist()
        if result.pooler_output and (pooled := result.pooler_output[0]) is not None:
            self.pooled = pooled.numpy()
        if result.logprobs is not None:
            self.logprobs += result.logprobs.logprobs[:, 0].tolist()
        self.token_ids = self.token_ids + sampled
        self.num_computed += len(sampled) if computed is None else computed


def _step(num_scheduled_tokens: dict[str, int], **fields: Any) -> SchedulerOutput:
    num_tokens = sum(num_scheduled_tokens.values())
    return replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=num_tokens,
        **fields,
    )
