# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: number of hits, isolation, and unchanged tokens."""

import pytest
from e2e.harness import counters, engine, generate, greedy
from vllm import TokensPrompt


def run(llm, prompts, salt=None):
    """Returns generated tokens and cached-token counts."""
    inputs = [
        TokensPrompt(prompt_token_ids=prompt, **({"cache_salt": salt} if salt else {}))
        for prompt in prompts
    ]
    outputs = llm.generate(inputs, greedy(4), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.more)])
def test_every_prompt_length_around_block_boundaries(tiny, tiny_text, block_size):
    # Each length starts with a token of its own, so that no prompt is a prefix of another.
    prompts = [[2 + n, *tiny_text[: n - 1]] for n in range(1, 3 * block_size + 1)]
    with engine(tiny, max_model_len=128, enable_prefix_caching=False, block_size=block_size) as llm:
        expected, cached = run(llm, prompts)
        assert not any(cached)
    # Room for all of them at once, or the cold pass would evict what the warm one asks for.
    with engine(tiny, max_model_len=128, block_size=block_size) as llm:
        cold, cached = run(llm, prompts)
        assert not any(cached)
        warm, cached = run(llm, prompts)
    assert cold == expected
    assert warm == expected
    assert cached == [(len(prompt) - 1) // block_size * block_size for prompt in prompts]


def test_tenants_share_by_salt_and_not_otherwise(tiny, tiny_text):
    prompt = tiny_text[:100]
    with engine(tiny, max_model_len=128) as llm:
        plain, cached = run(llm, [prompt])
        assert cached == [0]
        for salt, hit in [("one", 0), ("two", 0), ("one", 96), ("two", 96), (None, 96)]:
            tokens, cached = run(llm, [prompt], salt)
            assert (tokens, cached) == (plain, [hit]), salt


def test_reset_forgets_every_prefix(tiny, tiny_text):
    prompt = tiny_text[:100]
    with engine(tiny, max_model_len=128) as llm:
        before, _ = run(llm, [prompt])
        assert run(llm, [prompt]) == (before, [96])
        assert llm.reset_prefix_cache()
        assert run(llm, [prompt]) == (before, [0])


def test_a_prompt_may_hit_blocks_that_its_own_step_computes(tiny, tiny_text):
    prompts = [tiny_text[:90], tiny_text[:80], [*tiny_text[:64], *tiny_text[200:220]]]
    with engine(tiny, max_model_len=128, enable_prefix_caching=False) as llm:
        expected, _ = run(llm, prompts)
    with engine(tiny, max_model_len=128, max_num_batched_tokens=512) as llm:
        found, cached = run(llm, prompts)
        steps = counters(llm)["vllm:iteration_tokens_total:count"]
    assert steps <= 6  # one for the three prompts, then decoding
    assert cached == [0, 64, 64]
    assert found == expected


def test_generated_tokens_are_hit_too(tiny, tiny_text):
    prompt = tiny_text[:60]
    with engine(tiny, max_model_len=128) as llm:
        (answer,) = generate(llm, [prompt], greedy(40))
        follow_up = [*prompt, *answer, *prompt[:7]]
        tokens, cached = run(llm, [follow_up])
    # The last generated token's K/V were never needed, so the hundredth is not in the cache.
    assert cached == [96]
    with engine(tiny, max_model_len=128, enable_prefix_caching=False) as llm:
        assert run(llm, [follow_up]) == (tokens, [0])
