# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks, by layers: text under load equals mlx-lm's dense forward."""

import pytest
from e2e.harness import (
    Dense,
    checked_passes,
    engine,
    make_prompts,
    text_tokens,
)

MAX_TOKENS = 24


def serve_and_check(model, size, prompts, max_tokens=MAX_TOKENS, tie=None, **options):
    """Serves the prompts twice, checks every output, and returns the counters of both passes."""
    dense = Dense(model) if tie is None else Dense(model, tie)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64} | options
    with engine(model, pipeline_parallel_size=size, **settings) as llm:
        return checked_passes(llm, dense, prompts, max_tokens)


def check_hits_and_preemptions(seen):
    cold, warm = seen
    assert cold["vllm:num_preemptions"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0


@pytest.mark.more
def test_two_ranks(short):
    """Cold and warm, in a pool in which not all requests that run have room."""
    prompts = make_prompts(text_tokens(short), 24, 700)
    check_hits_and_preemptions(
        serve_and_check(short, 2, prompts, max_tokens=12, num_gpu_blocks_override=70)
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_64_prompts(smollm2, size):
    prompts = make_prompts(text_tokens(smollm2), 64, 700)
    check_hits_and_preemptions(serve_and_check(smollm2, size, prompts, num_gpu_blocks_override=70))


LOOKED_UP = {
    "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", LOOKED_UP)
def test_drafts_that_are_looked_up(short, method):
    """All ranks verify them; the last one makes them, and others hear of what was kept."""
    prompts = make_prompts(text_tokens(short), 24, 700)
    cold, warm = seen = serve_and_check(
        short,
        2,
        prompts,
        num_gpu_blocks_override=70,
        speculative_config={"method": method, "num_speculative_tokens": 3} | LOOKED_UP[method],
        additional_config={"fixed_draft_length": True},
    )
    check_hits_and_preemptions(seen)
    drafted = "vllm:spec_decode_num_draft_tokens"
    accepted = "vllm:spec_decode_num_accepted_tokens"
    assert warm[drafted] > cold[drafted] > cold[accepted] > 0
    assert warm[accepted] > cold[accepted]
