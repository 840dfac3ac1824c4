# SPDX-License-Identifier: Apache-2.0
"""One engine prefills and another decodes: what comes out is what one engine would have made."""

import numpy as np
import pytest
from e2e.drafting import METHODS, write_toys
from e2e.drafting import VOCAB as TOY_VOCAB
from e2e.fuzz.models import VOCAB
from e2e.peers import consumer, decode, free_port, prefill, producer, role_engine

BLOCK = 16
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return write_toys(tmp_path_factory.mktemp("toys"))


def cases(vocabulary, block):
    """For each length and part of it that is known already: the prompt, and that part."""
    rng = np.random.default_rng(8)
    for length in (1, block - 1, block, block + 1, 2 * block, 2 * block + 1):
        for known in (0, length // 2, length):
            prompt = rng.integers(2, vocabulary, length).tolist()
            yield prompt, prompt[:known]


def computed_alone(model, spec, texts, options):
    """What one engine makes of them.

    Where one token is left to compute, vLLM plans drafts for that very step, which a draft model
    has: so such a request is compared with one whose other tokens the engine has computed before.
    """
    ahead = spec is not None and spec["method"] == "draft_model"
    with role_engine(model, None, **options) as one:
        for prompt, known in texts:
            for before in (known, prompt[:-1] if ahead and len(prompt) % BLOCK == 1 else []):
                if before:
                    decode(one, before, max_tokens=1)
            yield decode(one, prompt)


def check_all(model, spec, ahead, vocabulary=VOCAB, block=BLOCK, **options):
    """Every length, behind every local hit, against one engine; how many drafts were right."""
    options |= {"async_scheduling": ahead, "additional_config": {"fixed_draft_length": True}}
    if spec is not None:
        options["speculative_config"] = {"num_speculative_tokens": NUM_DRAFTS} | spec
    texts = list(cases(vocabulary, block))
    expected = list(computed_alone(model, spec, texts, options))
    port, pulled = free_port(), 0
    with producer(model, port, **options) as p, consumer(model, port, **options) as d:
        for (prompt, known), alone in zip(texts, expected, strict=True):
            if known:
                decode(d, known, max_tokens=1)
            found = decode(d, prompt, prefill(p, prompt))
            what = f"{len(prompt)} tokens, {len(known)} known"
            assert found.tokens == alone.tokens, what
            assert (found.drafted, found.accepted) == (alone.drafted, alone.accepted), what
            if not known:
                assert found.pulled == (len(prompt) - 1) // block * block, what
            pulled += found.pulled
    assert pulled > 0
    return sum(served.accepted for served in expected)


AHEAD = pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.more)])


@AHEAD
@pytest.mark.parametrize("model", ["full", pytest.param("windowed", marks=pytest.mark.more)])
def test_without_drafts(tiny_models, model, ahead):
    check_all(str(tiny_models / model), None, ahead)


@AHEAD
@pytest.mark.parametrize(
    "method", ["draft_model", *(pytest.param(name, marks=pytest.mark.more) for name in METHODS[1:])]
)
def test_a_network_that_drafts(toys, method, ahead):
    toy = toys[method]
    options = {"skip_tokenizer_init": True}
    accepted = check_all(toy.model, toy.speculation, ahead, TOY_VOCAB, **options)
    assert (accepted > 0) == (method != "eagle")  # that toy is never right


@pytest.mark.more
@pytest.mark.parametrize(
    ("method", "ahead"), [("ngram", True), ("ngram", False), ("ngram_gpu", True), ("suffix", False)]
)
def test_lookups_in_the_text(tiny, method, ahead):
    spec = {"method": method}
    if method != "suffix":
        spec |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    check_all(tiny, spec, ahead)


@pytest.mark.more
def test_groups_with_windows_and_a_draft_model(tiny_models):
    spec = {"method": "draft_model", "model": str(tiny_models / "windowed-draft")}
    check_all(str(tiny_models / "windowed"), spec, True)


@pytest.mark.more
@pytest.mark.parametrize("model", ["full", "windowed"])
def test_an_fp8_cache_and_larger_blocks(tiny_models, model):
    for options in ({"kv_cache_dtype": "fp8"}, {"block_size": 32}):
        check_all(
            str(tiny_models / model), None, True, block=options.get("block_size", 16), **options
        )
