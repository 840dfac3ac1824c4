# SPDX-License-Identifier: Apache-2.0
"""After a remote prefill, an engine makes the same drafts as alone."""

import numpy as np
import pytest
from e2e.drafting import (
    BLOCK,
    METHODS,
    VOCAB,
    Toy,
    answer,
    draft_counts,
    drafting_engine,
    watching,
)
from e2e.harness import counters

from vllm_metal.engine.spec_decode import block_config

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 3)
NUM_TOKENS = 12


@pytest.fixture
def drafted(monkeypatch):
    with watching(monkeypatch) as drafted:
        yield drafted


def serve(llm, prompts, drafted, max_tokens=NUM_TOKENS):
    """Returns the answer, drafts per step and accepted drafts by prompt length."""
    found = {}
    for prompt in prompts:
        drafted.take()
        before = draft_counts(llm)
        (tokens,) = answer(llm, [prompt], max_tokens)
        counts = tuple(np.subtract(draft_counts(llm), before).tolist())
        found[len(prompt)] = (tokens, drafted.take(), counts)
    return found


def hits(llm, where):
    return counters(llm).get(f"vllm:{where}prefix_cache_hits", 0)


def without_block_drop(toy):
    """vLLM computes the last block of a local hit again where heads read hidden states; not here,
    so that the same tokens are found as another engine brings."""
    if toy.speculation["method"] in ("draft_model", *block_config.METHODS):
        return toy
    return Toy(toy.model, toy.speculation | {"disable_eagle_block_drop": True})


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method",
    [
        METHODS[0],
        pytest.param(METHODS[1], marks=pytest.mark.more),
        *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[2:]),
    ],
)
def test_behind_a_loaded_prompt(toys, tmp_path, drafted, method, ahead):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]
    toy, options = toys[method], {"async_scheduling": ahead}
    with drafting_engine(toy, tmp_path, "kv_producer", **options) as llm:
        serve(llm, prompts, drafted, 1)
    with drafting_engine(toy, tmp_path, **options) as llm:
        loaded = serve(llm, prompts, drafted)
        assert hits(llm, "external_") == sum(length // BLOCK * BLOCK for length in LENGTHS)
    with drafting_engine(toy, None, **options) as llm:
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        of_heads = method not in ("draft_model", *block_config.METHODS)
        assert any(group.is_eagle_group for group in groups) == of_heads
    with drafting_engine(without_block_drop(toy), None, **options) as llm:
        cold = serve(llm, prompts, drafted)
        assert hits(llm, "") == 0
        assert llm.reset_prefix_cache()
        serve(llm, prompts, drafted, 1)
        local = serve(llm, prompts, drafted)
        assert hits(llm, "") == sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
    # EAGLE's toy is never right; its drafts are compared all the same.
    assert (sum(accepted for _, _, (_, accepted) in cold.values()) > 0) == (method != "eagle")
    for length in LENGTHS:
        if not of_heads and length // BLOCK and length % BLOCK <= 1:
            # One token is left to compute: vLLM plans such a step with drafts, which what reads no
            # hidden states has before the step. So it drafts a step earlier, and the rest follows.
            (early, *later), (tokens, steps, _) = loaded[length][1], cold[length]
            assert loaded[length][0] == tokens and early[0][0] != tokens[0]
            assert later[: len(steps)] == steps
        else:
            assert loaded[length] == cold[length], length
        if length % BLOCK:  # else a local hit is a block shorter
            assert loaded[length] == local[length], length
