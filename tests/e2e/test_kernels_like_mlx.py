# SPDX-License-Identifier: Apache-2.0
"""The engine gives the same results on interpreted kernels as on MLX's operations."""

from dataclasses import dataclass

import pytest
from e2e.drafting import draft_counts
from e2e.harness import counters, generate, greedy
from e2e.test_hybrids import NGRAM, hybrid_engine, prompts_of
from engine.models import latent
from engine.models.recurrent import Family, write_model

MAX_TOKENS = 14
HEADS = {"num_hidden_layers": 2, "head_dim": 64}  # of a size that the kernels take
WINDOW = 24
#: Pool sizes without room for all running requests. Layers with windows need hits in both kinds
#: of blocks, so they find nothing with the smaller one.
FEW_BLOCKS, ENOUGH_BLOCKS = 18, 120
FAMILIES = {
    "plain": Family("llama", "LlamaForCausalLM", HEADS),
    "soft caps": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        latent.FAMILIES["gemma2"].config | HEADS | {"query_pre_attn_scalar": 64},
    ),
    "sinks and windows": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        HEADS
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": None,
        },
    ),
    "latents": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        latent.FAMILIES["deepseek_v3"].config | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    ),
}

MORE = (("soft caps", "auto"), ("sinks and windows", "auto"), ("latents", "auto"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("like-mlx")
    return {
        name: write_model(family, folder / name, drawn=True) for name, family in FAMILIES.items()
    }


@dataclass(frozen=True)
class Served:
    """An engine's results for some prompts, served twice."""

    texts: list[list[list[int]]]
    drafts: tuple[float, float]  # verified, accepted
    hits: float
    preemptions: float


def serve(model, cache, num_blocks):
    options = {
        "kv_cache_dtype": cache,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": num_blocks,
        "speculative_config": NGRAM,
    }
    prompts = prompts_of(7)
    with hybrid_engine(model, **options) as llm:
        params = greedy(MAX_TOKENS, detokenize=False)
        texts = [generate(llm, prompts, params) for _ in range(2)]
        seen = counters(llm)
        return Served(
            texts,
            draft_counts(llm),
            seen["vllm:prefix_cache_hits"],
            seen["vllm:num_preemptions"],
        )


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *(pytest.param(*case, marks=pytest.mark.more) for case in MORE),
        *(
            pytest.param(name, cache, marks=pytest.mark.slow)
            for name in FAMILIES
            for cache in ("auto", "fp8")
            if (name, cache) not in MORE
        ),
    ],
)
def test_texts_and_accepted_drafts_are_the_same(folders, name, cache, monkeypatch):
    """Has prefix hits, preemption and n-gram drafts, some of them right."""
    served, num_blocks = {}, ENOUGH_BLOCKS if "windows" in name else FEW_BLOCKS
    for kernels in ("mlx", "interpret"):
        monkeypatch.setenv("VLLM_METAL_KERNELS", kernels)
        served[kernels] = serve(folders[name], cache, num_blocks)
    by_mlx, interpreted = served["mlx"], served["interpret"]
    assert interpreted.texts == by_mlx.texts
    assert interpreted.drafts == by_mlx.drafts
    drafted, accepted = interpreted.drafts
    assert 0 < accepted < drafted
    assert interpreted.hits > 0
    assert interpreted.preemptions > 0 or num_blocks == ENOUGH_BLOCKS
