# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of the engine under load equal mlx-lm's dense generation, one at a time."""

import pytest
from e2e.harness import Dense, counters, engine, generate, greedy, make_prompts, text_tokens

MAX_TOKENS = 48
CHUNK = 64  # tokens of a step: longer prompts come in chunks
#: Blocks of the pool: a prompt of 700 fits, sixteen requests of the mean length do not.
NUM_BLOCKS = 110


@pytest.fixture(scope="module")
def dense(request, smollm2):
    return Dense(smollm2)


def serve_and_check(model, dense, prompts, async_scheduling, caching, passes=1, **options):
    """Runs the prompts `passes` times; every output is checked. Returns counters per pass."""
    seen = []
    with engine(
        model,
        max_num_seqs=16,
        max_num_batched_tokens=CHUNK,
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        **options,
    ) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == async_scheduling
        for _ in range(passes):
            outputs = generate(llm, prompts, greedy(MAX_TOKENS))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                assert len(tokens) == MAX_TOKENS
                dense.check(prompt, tokens)
            seen.append(counters(llm))
    return seen


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_without_prefix_caching(smollm2, dense, async_scheduling):
    prompts = make_prompts(text_tokens(smollm2), 64, 700)
    (after,) = serve_and_check(smollm2, dense, prompts, async_scheduling, caching=False)
    assert after["vllm:prefix_cache_hits"] == 0
    assert after["vllm:num_preemptions"] > 0
    # Steps hold at most CHUNK tokens, so the prompts longer than that came in chunks.
    steps = after["vllm:iteration_tokens_total:count"]
    assert after["vllm:iteration_tokens_total"] <= CHUNK * steps
    assert sum(len(prompt) > CHUNK for prompt in prompts) > 10


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_with_prefix_caching_cold_and_warm(smollm2, dense, async_scheduling):
    prompts = make_prompts(text_tokens(smollm2), 64, 700)
    cold, warm = serve_and_check(
        smollm2, dense, prompts, async_scheduling, caching=True, passes=2
    )
    assert cold["vllm:num_preemptions"] > 0
    assert cold["vllm:prefix_cache_hits"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]
