# SPDX-License-Identifier: Apache-2.0
"""Serves a request that nobody made, so that the first real one finds everything compiled.

MLX compiles the fused kernels of a graph when the device is first given it, and a forward becomes a
graph at the second step of its shapes (see models.compiled). Without this, the second token of the
first request waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_metal.sample import Sampler
    from vllm_metal.worker.model_runner import ModelRunner

REQ_ID = "vllm-metal-rehearsal"
PROMPT = [0, 0]  # a token that every vocabulary has
#: The first decode step shows a shape, the second one traces and compiles it. A draft network's
#: passes follow a step behind.
NUM_DECODE_STEPS, NUM_DECODE_STEPS_WITH_DRAFTS = 2, 3


def rehearse(
    runner: ModelRunner,
    sampler: Sampler,
    sampling: Mapping[str, Any],
    num_groups: int,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
) -> None:
    """Computes a short prompt and decode steps, and leaves runner and pool as they were.

    Waits for the device. Does less where the pool or the longest request has no room for more.

    Args:
        runner: without requests; it has nothing in flight.
        sampler: of the vocabulary, with no processors of the user's, who did not make the request.
        sampling: of requests that set nothing themselves, by name in SamplingParams.
        num_groups: KV cache groups.
        block_size: tokens of a block.
        num_blocks: of the pool.
        max_model_len: most tokens of a request.
    """
    with_drafts, rows = runner.num_drafts > 0, 1 + runner.num_drafts
    num_steps = NUM_DECODE_STEPS_WITH_DRAFTS if with_drafts else NUM_DECODE_STEPS
    most = min(max_model_len, (num_blocks - 1) // num_groups * block_size)  # block 0 is vLLM's own
    num_tokens = min(len(PROMPT) + num_steps * rows, most)
    if num_tokens < len(PROMPT):
        return
    per_group = -(-num_tokens // block_size)
    first = [1 + group * per_group for group in range(num_groups)]
    blocks = tuple(list(range(start, start + per_group)) for start in first)
    twin = runner.twin(sampler)
    try:
        computed = _prompt(twin, SamplingParams.from_optional(**sampling), blocks)
        while num_steps and computed + rows <= num_tokens:
            computed += _decode(twin, computed, rows)
            num_steps -= 1
        twin.learn()
    finally:
        twin.update_requests(_step({}, finished={REQ_ID}))
    twin.layers.update_blocks([block for group in blocks for block in group], ())
    twin.wait()


def _prompt(runner: ModelRunner, sampling: SamplingParams, blocks: tuple[list[int], ...]) -> int:
    """Computes the prompt; how many tokens that is."""
    request = NewRequestData(REQ_ID, PROMPT, [], sampling, None, blocks, 0, None)
    _run(runner, _step({REQ_ID: len(PROMPT)}, new=[request]))
    return len(PROMPT)


def _decode(runner: ModelRunner, computed: int, rows: int) -> int:
    """Computes one row more, and one for each draft; how many tokens are kept."""
    running = CachedRequestData(
        req_ids=[REQ_ID],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None],
        num_computed_tokens=[computed],
        num_output_tokens=[1],
    )
    drafts = {REQ_ID: [-1] * (rows - 1)} if rows > 1 else {}  # the runner proposes them
    return _run(runner, _step({REQ_ID: rows}, running=running, drafts=drafts))


def _run(runner: ModelRunner, step: SchedulerOutput) -> int:
    """Runs a step to its end; how many tokens it sampled."""
    runner.learn(step)
    for error in runner.update_requests(step).values():
        raise error
    runner.forward(step)
    (tokens,) = runner.sample_tokens(None).token_ids()
    return len(tokens)


def _step(
    num_scheduled_tokens: dict[str, int],
    new: Sequence[NewRequestData] = (),
    running: CachedRequestData | None = None,
    drafts: Mapping[str, list[int]] | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=running or CachedRequestData.make_empty(),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens=dict(drafts or {}),
        scheduled_encoder_inputs={},
        finished_req_ids=finished or set(),
        free_encoder_mm_hashes=[],
    )
