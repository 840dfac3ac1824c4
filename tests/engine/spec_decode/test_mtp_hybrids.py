# SPDX-License-Identifier: Apache-2.0
"""Drafts of hybrids' MTP layers follow the layer's formula; rejected ones leave no trace."""

import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy
from engine.models.cases import cases
from engine.spec_decode.heads import BLOCK, Bench, K, engine_config, serve_and_check
from engine.spec_decode.hybrids import FAMILIES, NaiveMTP, write_hybrid
from mlx.utils import tree_flatten

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode import mtp
from vllm_metal.engine.spec_decode.registry import load_network

LENGTHS = (1, 17, 40, 100)  # of prompts


@pytest.fixture(scope="module", params=cases(FAMILIES, ["qwen3_next"], ["qwen3_5_moe"]))
def bench(request, tmp_path_factory):
    folder = write_hybrid(tmp_path_factory.mktemp("models") / "target", request.param)
    return Bench(engine_config(folder, folder, "mtp", **text_of(request.param)), NaiveMTP(folder))


def text_of(family):
    """Returns options that load a model's text alone; mlx-vlm would load its images."""
    return {"language_model_only": True} if family.startswith("qwen3_5") else {}


@pytest.mark.usefixtures("unfused")
def test_drafts_are_the_formulas_for_prompts_in_chunks_and_any_pattern_of_acceptance(bench):
    bench.begin(0, bench.prompt(3 * BLOCK + 3))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    counts = [bench.step([1, 0], [K, 0], chunk=20) for _ in range(2)]  # beside a prompt
    assert counts == [[K, 0], [K, 0]]
    drafted = 0
    for _ in range(6):
        drafted += sum(bench.step(bench.rng.permutation(2), bench.rng.integers(0, K + 1, 2)))
    assert drafted > 10


@pytest.mark.parametrize("family", cases(FAMILIES, ["qwen3_next"], ["qwen3_5", "qwen3_5_moe"]))
def test_a_conversions_layer_is_the_published_one(tmp_path, monkeypatch, family):
    """mlx-lm already adds one to the norms' weights when it converts."""
    heads, make = [], mtp.MTPHead
    monkeypatch.setattr(mtp, "MTPHead", lambda *of: heads.append(make(*of)) or heads[-1])
    for converted in (False, True):
        folder = write_hybrid(tmp_path / str(converted), family, converted)
        config = engine_config(folder, folder, "mtp", **text_of(family))
        load_network(config, parts.ModelParts(loader.load(config)))
    published, kept = map(parameters, heads)
    assert published.keys() == kept.keys()
    for name, array in published.items():
        assert np.allclose(np.array(array), np.array(kept[name]), atol=1e-6), name


def parameters(head):
    """Returns a head's arrays by name, without the target's."""
    targets = ("embed_tokens", "lm_head")
    found = tree_flatten(head.parameters())
    return {name: array for name, array in found if not name.startswith(targets)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_served(tmp_path, monkeypatch, family):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = write_hybrid(tmp_path / "target", family, vocab_size=32)
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    serve_and_check(folder, speculation, **text_of(family))


@pytest.mark.parametrize("lengths", [pytest.param("fixed", marks=pytest.mark.slow), "adaptive"])
def test_drafts_that_are_mostly_right(tmp_path, monkeypatch, lengths):
    """Text is mlx-lm's, with accepted and rejected drafts, also after a hit."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = str(write_hybrid(tmp_path / "target", "qwen3_next", guessable=True))
    prompts = [
        np.random.default_rng(length).integers(0, 128, length).tolist() for length in LENGTHS
    ]
    dense = Dense(folder)
    with engine(
        folder,
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        additional_config={"fixed_draft_length": lengths == "fixed"},
    ) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(80, detokenize=False))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                dense.check(prompt, tokens)
        seen = counters(llm)
    drafted = seen["vllm:spec_decode_num_draft_tokens"]
    accepted = seen["vllm:spec_decode_num_accepted_tokens"]
    assert drafted / 2 < accepted < drafted
    assert seen["vllm:prefix_cache_hits"] > 0
