# SPDX-License-Identifier: Apache-2.0
"""One model on two ranks, by heads: text under load equals mlx-lm's dense forward."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, generate, greedy, make_prompts
from vllm import SamplingParams

from vllm_metal.distributed.sharding import nbytes

MAX_TOKENS = 16
SETTINGS = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 40,  # a prompt of 120 fits, what is served at once does not
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The engine; its workers are spawned."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def prompts_of(count, longest=120):
    tokens = np.random.default_rng(3).integers(2, VOCAB, 3000).tolist()
    return make_prompts(tokens, count, longest)


def weights(worker):
    """Bytes that a rank has of the model; called in its process."""
    return nbytes(worker.get_model())


@pytest.mark.slow
def test_64_prompts_cold_and_warm_and_what_a_rank_holds(tiny):
    dense, prompts, seen = Dense(tiny), prompts_of(64), []
    sampled = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with engine(tiny, tensor_parallel_size=2, **SETTINGS) as llm:
        for _ in range(2):
            for prompt, tokens in zip(
                prompts, generate(llm, prompts, greedy(MAX_TOKENS)), strict=True
            ):
                assert len(tokens) == MAX_TOKENS
                dense.check(prompt, tokens)
            seen.append(counters(llm))
        shares = llm.collective_rpc(weights)
        drawn = generate(llm, prompts, sampled)
    cold, warm = seen
    assert cold["vllm:num_preemptions"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0
    whole = nbytes(dense.model)
    assert len(shares) == 2
    assert all(whole / 2 < share < whole for share in shares)  # the embedding is whole
    with engine(tiny, **SETTINGS, async_scheduling=False) as llm:
        for _ in range(2):
            generate(llm, prompts, greedy(MAX_TOKENS))
        assert generate(llm, prompts, sampled) == drawn


@pytest.mark.more
def test_ngram_speculation_is_lossless(tiny):
    dense, prompts = Dense(tiny), prompts_of(12)
    prompts = [prompt + prompt[-40:] for prompt in prompts]  # something to look up
    with engine(tiny, tensor_parallel_size=2, speculative_config=NGRAM, **SETTINGS) as llm:
        for prompt, tokens in zip(prompts, generate(llm, prompts, greedy(MAX_TOKENS)), strict=True):
            dense.check(prompt, tokens)
        seen = counters(llm)
    assert seen["vllm:spec_decode_num_draft_tokens"] > 0
