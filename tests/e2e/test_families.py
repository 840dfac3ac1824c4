# SPDX-License-Identifier: Apache-2.0
"""Every other family of mlx-lm's with states or latents, from a folder, equals its dense forward.

Each is served under load: prompts that begin alike, in chunks, drafts of which few are right, more
requests than the pool has blocks for; then again, when what it needs is in the prefix cache.
"""

import pytest
from e2e.harness import Dense, engine
from e2e.test_hybrids import NGRAM, TOLD, check_passes
from engine.models.further import FAMILIES, REFUSED
from engine.models.recurrent import write_model
from engine.models.v41_formulas import write_with_memory
from mlx_lm.models.cache import make_prompt_cache

#: DeepSeek V4.1 with n-gram memory, whose layers have states beside compressed entries.
MEMORY = "deepseek_v41, memory"
#: One that transformers and vLLM do not know, K/V of other layers, and states alone.
MORE = ("gemma3n", MEMORY)
#: Families with states alone: their blocks have 32 tokens here, and each request owns two blocks.
ALONE = ("mamba", "rwkv7")
#: Families whose layers each have states and K/V: a request takes twice the blocks of others.
BOTH = ("baichuan_m1", "longcat_flash_ngram", MEMORY)


class Cached(Dense):
    """Computes with a cache: without one, mlx-lm's Gemma 3n does not share K/V."""

    def forward(self, tokens):
        return self.model(tokens, cache=make_prompt_cache(self.model))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.more if name in MORE else pytest.mark.slow)
        for name in (*FAMILIES, MEMORY)
    ],
)
@pytest.mark.parametrize(
    "chunk", [64, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 7, 512))]
)
def test_texts_under_load(name, chunk, tmp_path):
    if name == MEMORY:
        model = write_with_memory(tmp_path / name)
    else:
        model = write_model(FAMILIES[name], tmp_path / name)
    options = {"block_size": 32} if name in ALONE else {}
    if chunk == 1:  # a token a step: few requests do
        check_passes(model, 1, 3, Cached, max_num_batched_tokens=1, max_num_seqs=1, **options)
        return
    first, second = check_passes(
        model,
        count=36 if chunk == 512 else 12,
        judge=Cached,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 32),
        # With fewer, none that a prompt begins with is left for the second pass.
        num_gpu_blocks_override=400 if name in BOTH and chunk == 64 else 100,
        speculative_config=NGRAM if chunk == 64 else None,
        **options,
    )
    print(name, {key: value for key, value in second.items() if value and key in TOLD})
    assert second["vllm:prefix_cache_hits"] > first["vllm:prefix_cache_hits"]
    if chunk == 512 and name not in ALONE:
        assert second["vllm:num_preemptions"] > 0
    if chunk == 64:
        drafted, accepted = (
            second[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
        )
        assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "phi3small" else pytest.mark.slow) for name in REFUSED],
)
def test_what_the_paged_path_lacks_is_refused_when_it_loads(name, tmp_path):
    family, reason = REFUSED[name]
    model = write_model(family, tmp_path / name)
    with (
        pytest.raises(NotImplementedError, match=reason),
        # One of vLLM's classes of the names takes images.
        engine(model, skip_tokenizer_init=True, max_model_len=256, language_model_only=True),
    ):
        pass
