# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: text under load equals mlx-lm's dense forward."""

import re

import pytest
from e2e.harness import (
    Dense,
    checked_passes,
    counters,
    engine,
    make_prompts,
    text_tokens,
)
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.more

MAX_TOKENS = 24


LOOKED_UP = {"ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1}, "suffix": {}}


def drafts_of(method):
    """Returns options for three unconditional drafts per request."""
    return {
        "speculative_config": {"method": method, "num_speculative_tokens": 3} | LOOKED_UP[method],
        "additional_config": {"fixed_draft_length": True},
    }


def serve_and_check(model, size, prompts, max_tokens=MAX_TOKENS, tie=None, **options):
    """Serves the prompts twice, checks every output; returns counters of both passes."""
    dense = Dense(model) if tie is None else Dense(model, tie)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | options
    with engine(model, pipeline_parallel_size=size, **settings) as llm:
        return checked_passes(llm, dense, prompts, max_tokens)


def check_hits_and_preemptions(seen):
    cold, warm = seen
    assert cold["vllm:num_preemptions"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0


def check_drafts(seen):
    """Asserts that some drafts were accepted and some rejected in each pass."""
    before = (0, 0)
    for counted in seen:
        drafted, accepted = (
            counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
        )
        assert drafted - before[0] > accepted - before[1] > 0
        before = drafted, accepted


def test_two_ranks(tiny, tiny_text):
    """Runs cold and warm, in a pool that lacks room for all running requests."""
    prompts = make_prompts(tiny_text, 16, 200)
    options = {"max_model_len": 256, "num_gpu_blocks_override": 24}
    check_hits_and_preemptions(serve_and_check(tiny, 2, prompts, **options))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_64_prompts(smollm2, size):
    prompts = make_prompts(text_tokens(smollm2), 64, 700)
    check_hits_and_preemptions(serve_and_check(smollm2, size, prompts, num_gpu_blocks_override=70))


@pytest.mark.slow
@pytest.mark.parametrize("method", LOOKED_UP)
def test_drafts_that_are_looked_up(short, method):
    """All ranks verify drafts; the last one makes them and tells the others what was kept."""
    prompts = make_prompts(text_tokens(short), 24, 700)
    drafting = drafts_of(method)
    seen = serve_and_check(short, 2, prompts, num_gpu_blocks_override=70, **drafting)
    check_hits_and_preemptions(seen)
    check_drafts(seen)


@pytest.mark.slow
def test_drafts_where_ranks_share_heads_too(tiny, tiny_text):
    """Uses four ranks, two of which sample."""
    prompts = [prompt + prompt[-30:] for prompt in make_prompts(tiny_text, 16, 120)]
    options = {"tensor_parallel_size": 2, "max_model_len": 256, "num_gpu_blocks_override": 40}
    seen = serve_and_check(tiny, 2, prompts, **options, **drafts_of("ngram"))
    check_hits_and_preemptions(seen)
    check_drafts(seen)


@pytest.mark.slow
def test_drafts_beside_grammars(short):
    """No forbidden draft is kept; wanted tokens are looked up in the request's own text."""
    words = StructuredOutputsParams(regex="((one|two) (three|four) ){6}")
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=words)
    texts = ["one three one three ", "two four two four two ", "Count on: "] * 3
    with engine(short, pipeline_parallel_size=2, max_num_seqs=4, **drafts_of("ngram")) as llm:
        for output in llm.generate(texts, params, use_tqdm=False):
            assert re.fullmatch(words.regex, output.outputs[0].text)
        check_drafts([counters(llm)])
