# SPDX-License-Identifier: Apache-2.0
"""K/V of draft networks are kept and found with the model's: drafts are as good as before."""

import numpy as np
import pytest
from e2e.disk import ask, check_same, disk_engine, disk_hits
from e2e.drafting import FEW, answer, draft_counts, drafting_engine, write_toys
from e2e.fuzz.models import VOCAB
from e2e.harness import counters, run_out, text_tokens
from engine.spec_decode.fitted import FittedHeads

pytestmark = pytest.mark.more

NUM_DRAFTS = 3
FIXED = {"fixed_draft_length": True}


@pytest.fixture(scope="module")
def fitted(smollm2, tmp_path_factory):
    return FittedHeads(smollm2, text_tokens(smollm2)[:2048], tmp_path_factory.mktemp("heads"))


def accepted(llm):
    found = counters(llm)
    return [
        found.get(f"vllm:spec_decode_num_{name}", 0) for name in ("accepted_tokens", "draft_tokens")
    ]


def serve(llm, prompts, max_tokens):
    before = accepted(llm)
    answers = [answer for prompt in prompts for answer in ask(llm, [prompt], max_tokens)]
    run_out(llm)
    return answers, [now - then for now, then in zip(accepted(llm), before, strict=True)]


def check_acceptance(model, folder, prompts, speculation, first_tokens, slack, **options):
    """Whether drafts behind a prefix from disk are accepted as often as those behind a cold one.

    Args:
        first_tokens: that each request of the first engine generates. One leaves its last drafts'
            K/V unwritten but for what settles them.
        slack: accepted drafts that may be missing: the last slot of EAGLE's K/V saw another token.
    """
    spec = speculation | {"num_speculative_tokens": NUM_DRAFTS}
    options |= {"speculative_config": spec, "additional_config": FIXED}
    with disk_engine(model, folder, **options) as llm:
        expected, cold = serve(llm, prompts, 24)
        assert llm.reset_prefix_cache()
    other = folder.with_name("other")
    with disk_engine(model, other, **options) as llm:
        serve(llm, prompts, first_tokens)
    with disk_engine(model, other, **options) as llm:
        answers, warm = serve(llm, prompts, 24)
        assert disk_hits(llm) >= sum(len(prompt) // 16 * 16 - 16 for prompt in prompts)
    check_same(answers, expected)
    assert cold[0] > 0
    assert warm[0] >= cold[0] - slack, (warm, cold)


@pytest.fixture
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, length).tolist() for length in (128, 100, 65, 200)]


@pytest.mark.parametrize(
    ("model", "first_tokens"), [("full", 1), pytest.param("windowed", 24, marks=pytest.mark.slow)]
)
def test_a_draft_model(tiny_models, tmp_path, prompts, model, first_tokens):
    spec = {"method": "draft_model", "model": str(tiny_models / f"{model}-draft")}
    check_acceptance(
        str(tiny_models / model), tmp_path / "cache", prompts, spec, first_tokens, slack=0
    )


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_with_a_cache(smollm2, fitted, tmp_path, method):
    text = text_tokens(smollm2)
    prompts = [text[start : start + 130] for start in (0, 300, 600, 900)]
    options = {"kv_cache_memory_bytes": 128 << 20}
    check_acceptance(
        smollm2, tmp_path / "cache", prompts, fitted.speculation(method), 1, slack=4, **options
    )


def test_engines_with_and_without_an_assistant_share_pages(tmp_path):
    """Gemma 4's assistant has no K/V, so it drafts behind any engine's prefix."""
    toy = write_toys(tmp_path, for_kernels=True)["assistant"]
    prompt, found = [(7 * i * i + 3 + i // 5) % FEW for i in range(70)], []
    for role, speculation in (
        ("kv_producer", toy.speculation),
        ("kv_both", toy.speculation),
        ("kv_both", None),
    ):
        options = {"role": role, "speculative_config": speculation}
        with drafting_engine(toy, tmp_path / "pages", **options) as llm:
            found.append(answer(llm, [prompt], 30))
            assert disk_hits(llm) == (0 if role == "kv_producer" else 64)
            drafts = role == "kv_both" and speculation is not None
            assert (draft_counts(llm)[0] > 0) == drafts
    assert found[0] == found[1] == found[2]
