# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of the engine under load equal mlx-lm's dense generation, one at a time."""

import pytest
from e2e.harness import Dense, counters, engine, generate, greedy, make_prompts, text_tokens

pytestmark = pytest.mark.heavy

CHUNK = 64  # tokens of a step: longer prompts come in chunks
#: Whether steps overlap, which is the default and the harder case; prompts; blocks of the pool, in
#: which the longest prompt fits, and what is served at once does not; its tokens; those of answers.
LOADS = {
    "async": (True, 64, 110, 700, 48),
    "sync": (False, 24, 70, 700, 48),
    "async, short": (True, 10, 24, 300, 24),
}


@pytest.fixture(scope="module")
def dense(smollm2):
    return Dense(smollm2)


def serve_and_check(model, dense, prompts, max_tokens=48, passes=1, **options):
    """Serves the prompts `passes` times and checks every output; returns counters per pass."""
    seen = []
    with engine(model, max_num_seqs=16, max_num_batched_tokens=CHUNK, **options) as llm:
        scheduler = llm.llm_engine.vllm_config.scheduler_config
        assert scheduler.async_scheduling == options["async_scheduling"]
        for _ in range(passes):
            outputs = generate(llm, prompts, greedy(max_tokens))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                assert len(tokens) == max_tokens
                dense.check(prompt, tokens)
            seen.append(counters(llm))
    # Steps hold at most CHUNK tokens, so the prompts longer than that came in chunks.
    assert max(map(len, prompts)) > CHUNK
    steps = seen[-1]["vllm:iteration_tokens_total:count"]
    assert 0 < seen[-1]["vllm:iteration_tokens_total"] <= CHUNK * steps
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("load", ["async", "sync"])
def test_without_prefix_caching(smollm2, dense, load):
    async_scheduling, num_prompts, num_blocks, longest, max_tokens = LOADS[load]
    prompts = make_prompts(text_tokens(smollm2), num_prompts, longest)
    (after,) = serve_and_check(
        smollm2,
        dense,
        prompts,
        max_tokens,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    assert after["vllm:prefix_cache_hits"] == 0
    assert after["vllm:num_preemptions"] > 0


def test_two_layers_cold_and_warm(short):
    check_cold_and_warm(short, Dense(short), "async, short")


@pytest.mark.slow
@pytest.mark.parametrize("load", ["async", "sync"])
def test_with_prefix_caching_cold_and_warm(smollm2, dense, load):
    check_cold_and_warm(smollm2, dense, load)


def check_cold_and_warm(model, dense, load):
    async_scheduling, num_prompts, num_blocks, longest, max_tokens = LOADS[load]
    prompts = make_prompts(text_tokens(model), num_prompts, longest)
    cold, warm = serve_and_check(
        model,
        dense,
        prompts,
        max_tokens,
        passes=2,
        max_model_len=longest + max_tokens,
        num_gpu_blocks_override=num_blocks,
        async_scheduling=async_scheduling,
    )
    assert cold["vllm:num_preemptions"] > 0
    assert cold["vllm:prefix_cache_hits"] > 0
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]


#: Gemma's pool: one request of 700 takes 45 blocks of its full layers' group and up to 37 of each
#: of five window groups, so sixteen do not fit.
GEMMA_NUM_BLOCKS = 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caching", "passes"), [(True, 2), (False, 1)], ids=["cold and warm", "plain"]
)
def test_window_layers_past_their_window(gemma3, caching, passes):
    prompts = make_prompts(text_tokens(gemma3), 16, 700)
    prompts += [prompt[: 560 + 20 * i] for i, prompt in enumerate([prompts[1]] * 4)]
    assert sum(len(prompt) > 512 for prompt in prompts) >= 5
    seen = serve_and_check(
        gemma3,
        Dense(gemma3),
        prompts,
        passes=passes,
        num_gpu_blocks_override=GEMMA_NUM_BLOCKS,
        enable_prefix_caching=caching,
        async_scheduling=True,
    )
    hits = [counts["vllm:prefix_cache_hits"] for counts in seen]
    assert seen[0]["vllm:num_preemptions"] > 0
    assert hits[0] > 0 if caching else hits == [0]
    assert passes == 1 or hits[1] > hits[0]
