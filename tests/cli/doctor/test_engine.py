# SPDX-License-Identifier: Apache-2.0
"""The doctor's engine part: a real in-process engine, and failing processes.

With parts turned off, processes answer as engines do.
"""

import dataclasses

import pytest
from cli.doctor.conftest import ended, ignore

from vllm_metal.cli.doctor import engine, model
from vllm_metal.cli.doctor.model import Model
from vllm_metal.device.child import LIMITS

SOME = Model("some", "/nowhere", local=True)
ANSWER = "send_message(prompt=[1], tokens=list(range(10)), text='t', answer_seconds=0.1)\n"
SHUTTING_DOWN = f"{ANSWER}send_message(stage='shutting down')\n"


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_made_on_the_spot_runs_and_wrong_tokens_are_seen(run_here, monkeypatch, processes):
    if not processes:
        monkeypatch.setattr(engine, "run", run_here)
        monkeypatch.setattr(model, "run", run_here)
    with model.made_on_the_spot(ignore) as made:
        tried = engine.run_child(made, ignore, "engine")
        found = engine.check_in_process(tried)
        assert found.status == "ok", (found.seen, *found.log)
        assert tried.reported["stage"] == "leaving"
        tokens = tried.reported["tokens"]
        assert len(tokens) == 10
        assert engine.compare(made, tried, ignore).status == "ok"
        wrong = {"tokens": [*tokens[:6], (tokens[6] + 1) % 64, *tokens[7:]]}
        found = engine.compare(
            made, dataclasses.replace(tried, reported=tried.reported | wrong), ignore
        )
    assert found.status == "failed", found.seen
    assert f"token 7 is {wrong['tokens'][6]} where mlx-lm chooses {tokens[6]}" in found.seen


@pytest.mark.parametrize(
    "text, seen",
    [
        (
            f"{SHUTTING_DOWN}import os\nos.abort()\n",
            "ended by signal 6 (SIGABRT) while shutting down",
        ),
        (
            f"{SHUTTING_DOWN}raise RuntimeError('no host allocator')\n",
            "exit status 1 while shutting down: RuntimeError: no host allocator",
        ),
        (f"{SHUTTING_DOWN}import time\ntime.sleep(600)\n", "hung while shutting down"),
        (
            "send_message(stage='loading the model')\nraise MemoryError('48 GiB')\n",
            "MemoryError: 48 GiB",
        ),
        (ANSWER.replace("range(10)", "range(3)"), "gave 3 tokens, not 10"),
    ],
    ids=["crash", "error", "hang", "load", "few"],
)
def test_whatever_goes_wrong_is_a_failure_that_is_named(script, text, seen):
    limits = {**LIMITS, "shutting down": 1.0} if "hung" in seen else LIMITS
    tried = engine.run_child(SOME, ignore, "engine", command=script(text), limits=limits)
    found = engine.check_in_process(tried)
    assert found.status == "failed"
    assert seen in found.seen
    assert found.advice


def test_tokens_may_differ_by_rounding_alone():
    tried = ended(tokens=[5, 6], text="t")
    near = ended(behind=[0.0, 0.2], spread=[10.0, 10.0], choices=[5, 7])
    assert engine.judge(tried, near).status == "ok"
    far = ended(behind=[0.0, 2.0], spread=[10.0, 10.0], choices=[5, 7])
    found = engine.judge(tried, far)
    assert found.status == "failed" and "token 2 is 6 where mlx-lm chooses 7" in found.seen


FORMAT = "send_message(prompt=[1], tokens={tokens}, text='{text}', answer_seconds=0.25)\n"
SETTINGS = {
    "VLLM_METAL_KERNELS=mlx",
    "MLX_DISABLE_COMPILE=1",
    "MLX_MAX_MB_PER_BUFFER=1048576",
}


def usual(tokens: list[int]):
    return ended(tokens=tokens, text="usual", answer_seconds=0.5)


def test_each_runs_with_its_variable_and_the_same_text_is_well(script, monkeypatch):
    # Each says which of the three it has: one, and with its value.
    names = [setting.partition("=")[0] for setting in sorted(SETTINGS)]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    text = "import os\n" + FORMAT.format(tokens="[1]", text="t")
    text += f"send_message(has=[n + '=' + os.environ[n] for n in {names} if n in os.environ])\n"
    tried = engine.try_variants(SOME, ignore, script(text))
    assert set(tried) == SETTINGS
    assert all(ended.reported["has"] == [setting] for setting, ended in tried.items())
    found = engine.check_variants(usual([1]), tried)
    assert found.status == "ok"
    assert "as usual: 0.50 s" in found.seen and "MLX_DISABLE_COMPILE=1: 0.25 s" in found.seen


def test_another_text_and_a_crash_are_named(script):
    tried = engine.try_variants(SOME, ignore, script(FORMAT.format(tokens="[2]", text="other")))
    tried["MLX_DISABLE_COMPILE=1"] = ended(-6, ("abort",), stage="answering")
    found = engine.check_variants(usual([1]), tried)
    assert found.status == "warning" and found.advice
    assert "VLLM_METAL_KERNELS=mlx: 0.25 s, other text: 'other'" in found.seen
    assert "MLX_DISABLE_COMPILE=1: ended by signal 6 (SIGABRT) while answering" in found.seen
    assert found.log == ("MLX_DISABLE_COMPILE=1: abort",)
