# SPDX-License-Identifier: Apache-2.0
"""Time limits for the end of an engine's process."""

import subprocess
import sys

import pytest
from vllm.v1.engine import utils

from vllm_metal.patches.vllm_patches import shutdown


@pytest.mark.parametrize(
    ("system", "variable", "asked", "given"),
    [
        ("linux", None, 0, 15.0),
        ("darwin", None, 0, 60.0),
        ("darwin", None, 90.0, 90.0),
        ("darwin", None, None, 60.0),
        ("darwin", "30", 0, 0),  # vLLM puts the variable's time in place of 0
    ],
)
def test_an_engine_gets_time_to_end_and_on_a_mac_more(system, variable, asked, given, monkeypatch):
    """By default: a Mac may lose memory that a killed process had wired."""
    monkeypatch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", variable)
    timeouts = []

    class Manager:
        _request_shutdown_timeout = 0

        def shutdown(self, timeout=None):
            timeouts.append(timeout)

    monkeypatch.setattr(utils, "CoreEngineProcManager", Manager)
    monkeypatch.setattr("sys.platform", system)
    shutdown.let_engines_end()
    Manager().shutdown(timeout=asked)
    assert timeouts == [given]


ENDING = """
import atexit, multiprocessing, sys
from vllm_metal.patches.vllm_patches import shutdown

class Module:
    def __del__(self):
        print("taken down")

module = Module()
multiprocessing.current_process().name = {name!r}
atexit.register(print, "registered")
try:
    raise SystemExit({code})
finally:
    shutdown.ending_at_once(lambda engine: print("shut down"), None)
"""


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("EngineCore", 0, ["shut down", "registered"]),
        ("EngineCore", 3, ["shut down", "registered", "taken down"]),
        ("MainProcess", 0, ["shut down", "registered", "taken down"]),
    ],
)
def test_an_engine_that_was_told_to_end_leaves_its_modules(name, code, said):
    command = [sys.executable, "-c", ENDING.format(name=name, code=code)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()) == (code, said), ended.stderr
