# SPDX-License-Identifier: Apache-2.0
"""Latent attention, soft caps, shared K/V: text under load equals mlx-lm's dense forward."""

import pytest
from e2e.harness import counters, generate
from e2e.test_hybrids import NGRAM, check_passes, greedy_ids, hybrid_engine, prompts_of
from engine.models.latent import FAMILIES
from engine.models.recurrent import write_model

QUICK = "deepseek_v3"
#: States beside latents, soft caps, and K/V that layers share.
MORE = ("kimi_linear", "gemma4_text")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    return {name: write_model(family, folder / name) for name, family in FAMILIES.items()}


@pytest.mark.parametrize(
    "name",
    [
        QUICK,
        *(pytest.param(name, marks=pytest.mark.more) for name in MORE),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FAMILIES
            if name not in (QUICK, *MORE)
        ),
    ],
)
def test_hits_drafts_and_preemptions(folders, name):
    _, second = check_passes(folders[name], num_gpu_blocks_override=60, speculative_config=NGRAM)
    assert second["vllm:prefix_cache_hits"] > 0
    assert second["vllm:num_preemptions"] > 0
    drafted, accepted = (
        second[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "chunk", [pytest.param(7, marks=pytest.mark.more), pytest.param(512, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != QUICK)],
)
def test_chunks(folders, name, chunk):
    check_passes(
        folders[name], passes=1, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 32), count=12
    )


@pytest.mark.more
@pytest.mark.parametrize("elements", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_latents_as_codes(folders, elements):
    """A cached row gives the answer of the step that computed it."""
    prompts, texts = prompts_of(8), []
    for chunk in (16, 512):
        with hybrid_engine(
            folders["deepseek_v3"], kv_cache_dtype=elements, max_num_batched_tokens=chunk
        ) as llm:
            texts.append(generate(llm, prompts, greedy_ids()))
            assert generate(llm, prompts, greedy_ids()) == texts[-1]
            assert counters(llm)["vllm:prefix_cache_hits"] > 0
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(prompts) - 1
