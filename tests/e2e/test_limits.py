# SPDX-License-Identifier: Apache-2.0
"""Limits: the model's length, the memory, a changing batch."""

import re

import psutil
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy, text_tokens

from vllm_metal.engine.memory.advice import BudgetError


@pytest.mark.parametrize(
    "async_scheduling",
    [True, pytest.param(False, marks=pytest.mark.more)],
    ids=["async", "sync"],
)
def test_generation_stops_at_max_model_len(tiny, tiny_text, async_scheduling):
    prompt = tiny_text[:40]
    with engine(tiny, max_model_len=64, async_scheduling=async_scheduling) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(100), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    assert len(prompt) + len(completion.token_ids) == 64
    Dense(tiny).check(prompt, list(completion.token_ids))


def test_requests_of_many_lengths_come_and_go(tiny, tiny_text):
    prompts = [tiny_text[7 * i : 7 * i + 3 + 11 * (i % 5)] for i in range(20)]
    params = [greedy(1 + 3 * (i % 7)) for i in range(20)]
    dense = Dense(tiny)
    with engine(tiny, max_model_len=256, max_num_seqs=4) as llm:
        outputs = generate(llm, prompts, params)
        usage = counters(llm)["vllm:kv_cache_usage_perc"]
    for prompt, wanted, generated in zip(prompts, params, outputs, strict=True):
        assert len(generated) == wanted.max_tokens
        dense.check(prompt, generated)
    assert usage == 0


def test_the_pool_is_what_is_left_of_the_devices_share(short):
    share = 2**29  # bytes of this machine for weights and pool; the rest stays untouched
    options = {"kv_cache_memory_bytes": None, "max_num_batched_tokens": 64}
    utilization = share / psutil.virtual_memory().total
    with engine(short, gpu_memory_utilization=utilization, **options) as llm:
        config = llm.llm_engine.vllm_config
        bytes_per_token = 2 * 2 * 3 * 64 * 4  # K and V, layers, heads, head size, float32
        pool = config.cache_config.num_gpu_blocks * 16 * bytes_per_token
        weights = 141_567_000  # 49152 rows of an embedding, and two layers
        assert 0.3 * (share - weights) < pool < share - weights
        assert len(generate(llm, [text_tokens(short)[:9]], greedy(3))[0]) == 3


def test_a_budget_that_cannot_be_says_why_with_numbers(short):
    share = 2**26 / psutil.virtual_memory().total  # of which the weights take twice as much
    told = re.escape(f"--gpu-memory-utilization {share:g} ")
    refusal = rf"(?s)no memory is left for the KV cache:.*{told}.*- weights"
    with (
        pytest.raises(BudgetError, match=refusal),
        engine(short, kv_cache_memory_bytes=None, gpu_memory_utilization=share),
    ):
        pass


def test_a_pool_too_small_for_one_request_names_the_length_that_fits(short):
    with (
        pytest.raises(ValueError, match=r"--max-model-len \d+ or less"),
        engine(short, kv_cache_memory_bytes=2 << 20, max_model_len=1024),
    ):
        pass
