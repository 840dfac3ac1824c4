# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes start; tests/darwin shows where engines run."""

import sys

import pytest
from darwin.run import run
from vllm import envs

from vllm_metal.patches.vllm_patches import processes

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
TELL = (
    "from vllm.platforms import current_platform as platform; platform.device_type\n"
    "from vllm.utils.system_utils import get_mp_context\n"
    "print(get_mp_context().get_start_method())"
)


@pytest.mark.parametrize(
    ("system", "chosen", "method"),
    [("darwin", None, "spawn"), ("darwin", "fork", "fork"), ("linux", None, "fork")],
)
def test_macos_spawns_unless_told_otherwise(monkeypatch, system, chosen, method) -> None:
    vllms = envs.env_with_choices(METHOD, "fork", ["spawn", "fork"])
    monkeypatch.setitem(envs.environment_variables, METHOD, vllms)
    monkeypatch.setattr(sys, "platform", system)
    if chosen is None:
        monkeypatch.delenv(METHOD, raising=False)
    else:
        monkeypatch.setenv(METHOD, chosen)
    processes.spawn_on_macos()
    assert envs.environment_variables[METHOD]() == method


@pytest.mark.parametrize(
    ("variables", "method"),
    [
        pytest.param({}, "spawn", marks=pytest.mark.more),
        pytest.param({METHOD: "fork"}, "fork", marks=pytest.mark.slow),
    ],
)
def test_a_process_on_macos(variables: dict[str, str], method: str) -> None:
    told = run(["-c", TELL], **variables)
    assert told.stdout.splitlines()[-1] == method, told.stderr
