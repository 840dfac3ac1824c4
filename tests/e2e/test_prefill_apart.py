# SPDX-License-Identifier: Apache-2.0
"""One engine prefills and another decodes: what comes out is what one engine would have made."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.peers import consumer, decode, free_port, prefill, producer, role_engine

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
NUM_DRAFTS = 3


def texts(vocabulary):
    """For each length and what is there already: the prompt, and what is asked before."""
    rng = np.random.default_rng(8)
    for length in LENGTHS:
        for known in (0, length // 2, length):
            prompt = rng.integers(2, vocabulary, length).tolist()
            yield prompt, prompt[:known]


def options_of(spec, ahead, **more):
    options = {"async_scheduling": ahead, "additional_config": {"fixed_draft_length": True}}
    if spec is not None:
        options["speculative_config"] = spec | {"num_speculative_tokens": NUM_DRAFTS}
    return options | more


def check_all(model, spec, ahead, vocabulary=VOCAB, **more):
    """Every length, behind every local hit, against one engine that computes all by itself."""
    options = options_of(spec, ahead, **more)
    cases = list(texts(vocabulary))
    with role_engine(model, None, **options) as one:
        expected = []
        for prompt, known in cases:
            if known:
                decode(one, known, max_tokens=1)
            expected.append(decode(one, prompt))
    port, pulled = free_port(), 0
    with producer(model, port, **options) as p, consumer(model, port, **options) as d:
        for (prompt, known), alone in zip(cases, expected, strict=True):
            if known:
                decode(d, known, max_tokens=1)
            found = decode(d, prompt, prefill(p, prompt))
            what = f"{len(prompt)} tokens, {len(known)} known"
            assert found.tokens == alone.tokens, what
            assert (found.drafted, found.accepted) == (alone.drafted, alone.accepted), what
            if not known:
                assert found.pulled == (len(prompt) - 1) // BLOCK * BLOCK, what
            pulled += found.pulled
    assert pulled > 0
    return sum(served.accepted for served in expected)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("model", ["full", "windowed"])
def test_without_drafts(tiny_models, model, ahead):
    check_all(str(tiny_models / model), None, ahead)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("model", ["full", "windowed"])
def test_a_draft_model(tiny_models, model, ahead):
    spec = {"method": "draft_model", "model": str(tiny_models / f"{model}-draft")}
    assert check_all(str(tiny_models / model), spec, ahead) > 0
