# SPDX-License-Identifier: Apache-2.0
"""What is said of times; they are taken for real in test_run."""

import pytest
from commands.doctor.conftest import ended, ignore

from vllm_metal.commands.doctor import engine, speed
from vllm_metal.commands.doctor.model import Model

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
    assert found.status == "ok" and "on a CPU, so that it says nothing of a Mac" in found.seen


@pytest.mark.parametrize(
    "after, status", [(0.02, "ok"), (0.1, "ok"), (0.2, "warning"), (1.0, "warning")]
)
def test_a_step_after_a_pause_is_warned_of_where_a_person_notices(after, status):
    found = speed.check_idle(ended(**TIMED | {"step_after_idle_seconds": after}))
    assert found.status == status
    assert f"{1000 * after:.1f} ms after 3 s, 10.0 at once" in found.seen
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
