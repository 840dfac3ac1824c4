# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel with every kind of layer: text equals mlx-lm's dense forward."""

import pytest
from e2e.test_hybrids import NGRAM, check_passes
from engine.models import published, recurrent

#: Whose layers keep states: of each kind, and of attention with a window beside states.
STATES = ("qwen3_next", "falcon_h1", "lfm2", "jamba", "mamba2", "recurrent_gemma")
#: Whose layers keep latents, choose among experts, or see a window.
OTHERS = ("deepseek_v2", "deepseek_v3", "qwen3_moe", "gpt_oss", "gemma3_text")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [*((name, True) for name in STATES), ("qwen3_next", False)],
)
def test_states(name, prefixes, tmp_path):
    """The pool has blocks for a few of the running requests."""
    first, second = check_passes(
        recurrent.write_model(recurrent.FAMILIES[name], tmp_path / name),
        pipeline_parallel_size=2,
        num_gpu_blocks_override=30 if name == "recurrent_gemma" else 60,
        enable_prefix_caching=prefixes,
    )
    if prefixes and name != "recurrent_gemma":  # where so few blocks leave nothing to be found
        assert 0 < first["vllm:prefix_cache_hits"] < second["vllm:prefix_cache_hits"]
    if name != "mamba2":  # whose requests need two blocks each
        assert second["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("prefixes", [True, False], ids=["cached", "not_cached"])
def test_states_whose_heads_are_shared(prefixes, tmp_path):
    """Uses Qwen3.5, whose states mlx-lm shards by heads (tensor parallel)."""
    made = published.make(published.FAMILIES["qwen3_5_text"], num_key_value_heads=2, vocab_size=96)
    _, second = check_passes(
        published.write(made, tmp_path / "model"),
        tensor_parallel_size=2,
        num_gpu_blocks_override=60,
        enable_prefix_caching=prefixes,
    )
    assert (second["vllm:prefix_cache_hits"] > 0) is prefixes
    assert second["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("name", OTHERS)
def test_latents_experts_and_windows(name, tmp_path):
    first, second = check_passes(
        published.write(published.make(published.FAMILIES[name]), tmp_path / name),
        pipeline_parallel_size=2,
        num_gpu_blocks_override=40,
        speculative_config=NGRAM,
    )
    assert 0 < first["vllm:prefix_cache_hits"] < second["vllm:prefix_cache_hits"]
    assert second["vllm:num_preemptions"] > 0
    drafted, accepted = (
        second[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
