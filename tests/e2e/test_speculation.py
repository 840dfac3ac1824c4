# SPDX-License-Identifier: Apache-2.0
"""Speculation changes how many steps a text takes, never the text."""

import pytest
from e2e.harness import Dense, counters, engine, generate, greedy, make_prompts, text_tokens

MAX_TOKENS = 16
CHUNK = 64


@pytest.fixture(scope="module")
def dense(smollm2):
    return Dense(smollm2)


def ngram(num_drafts, method="ngram_gpu"):
    return {
        "method": method,
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }


@pytest.mark.parametrize(
    ("method", "async_scheduling", "num_drafts", "block_size"),
    [("ngram_gpu", True, 3, 16), ("ngram", False, 7, 32)],
)
def test_greedy_tokens_are_those_without(
    smollm2, dense, method, async_scheduling, num_drafts, block_size
):
    prompts = make_prompts(text_tokens(smollm2), 16, 200)
    with engine(
        smollm2,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        max_model_len=256,
        num_gpu_blocks_override=24 * 16 // block_size,
        block_size=block_size,
        async_scheduling=async_scheduling,
        speculative_config=ngram(num_drafts, method),
    ) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == async_scheduling
        seen = []
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(MAX_TOKENS))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                assert len(tokens) == MAX_TOKENS
                dense.check(prompt, tokens)
            seen.append(counters(llm))
    cold, warm = seen
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]
    assert cold["vllm:spec_decode_num_accepted_tokens"] > 0
    assert cold["vllm:num_preemptions"] > 0
