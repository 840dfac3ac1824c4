# SPDX-License-Identifier: Apache-2.0
"""Evaluation of times; test_run measures real ones."""

import pytest
from cli.doctor.conftest import ended, ignore
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from vllm_metal.cli.doctor import engine, speed
from vllm_metal.cli.doctor.children.mlx_lm_alone import used_parameters
from vllm_metal.cli.doctor.model import Model

SOME = Model("some", "/nowhere", local=True)
TIMED = {
    "prefill": 900.0,
    "decode": 90.0,
    "pool_tokens": 8192,
    "active_bytes": 2**31,
    "idle_seconds": 3.0,
    "step_seconds": 0.01,
    "step_after_idle_seconds": 0.02,
}
ALONE = {"prefill": 1000.0, "decode": 100.0}


def test_figures_and_ratios_are_told():
    found = speed.check_speed(ended(**TIMED), ended(**ALONE))
    assert found.status == "ok"
    assert "decode 90 tokens a second, 0.90 of mlx-lm's 100" in found.seen
    assert "prefill 900" in found.seen and "for 8192 tokens, 2.00 GiB" in found.seen


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_less_than_half_of_mlx_lms_is_warned_of(phase):
    found = speed.check_speed(ended(**TIMED | {phase: 0.4 * ALONE[phase]}), ended(**ALONE))
    assert found.status == "warning"
    assert f"{phase} " in found.seen and "0.40 of mlx-lm's" in found.seen
    assert "report" in found.advice
    found = speed.check_speed(ended(**TIMED | {phase: 0.4 * ALONE[phase]}), ended(**ALONE), "cpu")
    assert found.status == "ok" and "on a CPU, which says nothing about a Mac" in found.seen


@pytest.mark.parametrize(
    ("parameters", "decode", "status"),
    [
        (0.6e9, 0.7, "ok"),
        (0.6e9, 0.4, "warning"),
        (3.2e9, 0.9, "ok"),
        (3.2e9, 0.8, "warning"),
    ],
)
def test_a_large_model_must_come_nearer_to_mlx_lm(parameters, decode, status):
    timed = ended(**TIMED | {"decode": decode * ALONE["decode"]})
    found = speed.check_speed(timed, ended(**ALONE, parameters=parameters))
    assert found.status == status
    assert ("--model" in found.advice) == (status == "warning" and parameters < 1e9)


def test_of_experts_those_that_a_token_uses_count():
    config = {
        **{"hidden_size": 64, "intermediate_size": 32, "head_dim": 32, "vocab_size": 32},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64},
        **{"model_type": "qwen3_moe", "tie_word_embeddings": True},
    }
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    of_experts = 8 * 3 * 32 * 64
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert used_parameters(model) == total - of_experts * 6 // 8


@pytest.mark.parametrize(
    "after, status", [(0.02, "ok"), (0.1, "ok"), (0.2, "warning"), (1.0, "warning")]
)
def test_a_step_after_a_pause_is_warned_of_where_a_person_notices(after, status):
    found = speed.check_idle(ended(**TIMED | {"step_after_idle_seconds": after}))
    assert found.status == status
    assert f"{1000 * after:.1f} ms after 3 s" in found.seen and "(10.0 ms)" in found.seen
    assert ("docs/memory.md" in found.advice) == (status == "warning")


def test_slow_by_factors_but_not_to_a_person_is_well():
    found = speed.check_idle(ended(**TIMED | {"step_seconds": 0.001}))
    assert found.status == "ok" and "20.0 times as long" in found.seen


def test_an_engine_that_dies_is_a_warning_that_says_how(script):
    timed = engine.run_child(SOME, ignore, "engine", command=script("raise MemoryError('48 GiB')"))
    for found in (speed.check_idle(timed), speed.check_speed(timed, timed)):
        assert found.status == "warning" and "MemoryError: 48 GiB" in found.seen
    found = speed.check_speed(ended(**TIMED), ended(1, ("ValueError: no such model",)))
    assert found.status == "warning" and "mlx-lm's process" in found.seen
