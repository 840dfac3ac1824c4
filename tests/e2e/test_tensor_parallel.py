# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: text under load equals mlx-lm's dense forward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, checked_passes, counters, engine, generate, greedy, make_prompts
from vllm import SamplingParams

from vllm_metal.cli.fit import ranks
from vllm_metal.cli.fit.estimate import Model
from vllm_metal.engine.models.loader import weight_bytes

pytestmark = pytest.mark.more

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
    """Runs the engine in this process; its workers are spawned."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def prompts_of(count, longest=120):
    tokens = np.random.default_rng(3).integers(2, VOCAB, 3000).tolist()
    return make_prompts(tokens, count, longest)


def weights(worker):
    """Returns a rank's bytes of the model; called in its process."""
    return weight_bytes(worker.get_model())


def serve_cold_and_warm(llm, dense, prompts):
    """Serves the prompts twice, checks every token; returns counters of both passes."""
    cold, warm = checked_passes(llm, dense, prompts, MAX_TOKENS)
    assert cold["vllm:num_preemptions"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0


def check_drawn(llm, dense, prompts):
    """Ranks go on with the same draws of requests without a seed: else a token's logprob would be
    of another text on one of them."""
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    for prompt, output in zip(prompts, llm.generate(asked, params, use_tqdm=False), strict=True):
        drawn = list(output.outputs[0].token_ids)
        rows = dense.logits([*prompt, *drawn[:-1]])[len(prompt) - 1 :]
        for row, token, found in zip(rows, drawn, output.outputs[0].logprobs, strict=True):
            expected = row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
            assert abs(found[token].logprob - expected) < 1e-3


@pytest.mark.slow
def test_64_prompts_cold_and_warm_and_what_a_rank_holds(tiny):
    dense, prompts = Dense(tiny), prompts_of(64)
    with engine(tiny, tensor_parallel_size=2, **SETTINGS) as llm:
        serve_cold_and_warm(llm, dense, prompts)
        shares = llm.collective_rpc(weights)
        check_drawn(llm, dense, prompts[:16])
    with ranks.alone(2) as ring:
        planned = Model.read(Path(tiny), "llama", torch.float32, ring=ring).weights
    assert shares == [planned, planned]
    assert planned < weight_bytes(dense.model)


@pytest.mark.slow
def test_stages_whose_heads_are_shared(tiny):
    dense, prompts = Dense(tiny), prompts_of(64)
    shape = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with engine(tiny, **shape, **SETTINGS) as llm:
        serve_cold_and_warm(llm, dense, prompts)
        check_drawn(llm, dense, prompts[:16])


@pytest.mark.slow
def test_ngram_speculation_is_lossless(tiny):
    dense, prompts = Dense(tiny), prompts_of(12)
    prompts = [prompt + prompt[-40:] for prompt in prompts]  # something to look up
    with engine(tiny, tensor_parallel_size=2, speculative_config=NGRAM, **SETTINGS) as llm:
        for prompt, tokens in zip(prompts, generate(llm, prompts, greedy(MAX_TOKENS)), strict=True):
            dense.check(prompt, tokens)
        seen = counters(llm)
    assert seen["vllm:spec_decode_num_draft_tokens"] > 0
