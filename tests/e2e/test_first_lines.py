# SPDX-License-Identifier: Apache-2.0
"""The default output of `vllm serve`: its address, or why it does not start."""

import os
import shutil
import subprocess
import sys

import pytest
from e2e.server import SPAWNED, refused_start, serve

from vllm_metal.patches.vllm_patches.start_failures import ERROR_PREFIX

pytestmark = pytest.mark.more
ALLOWED = "Found ulimit of"  # vLLM's warning where the shell allows few open files


@pytest.fixture
def unasked(tmp_path, monkeypatch):
    """Variables of a user without log settings; logs have their own folder."""
    return {**SPAWNED, "VLLM_LOGGING_LEVEL": "", "VLLM_METAL_CACHE": str(tmp_path / "cache")}


def lines(log):
    """Returns a terminal's final lines, without overwritten ones."""
    shown = [line.rpartition("\r")[2] for line in log.read_text().splitlines()]
    return [line for line in shown if ALLOWED not in line]


def test_a_start_says_where_its_log_is_and_how_to_ask(long_texts, tmp_path, unasked):
    log = tmp_path / "terminal"
    with serve(long_texts, ["--max-model-len", "512"], log, environment=unasked) as server:
        (file,) = (tmp_path / "cache" / "logs").glob("serve-*.log")
        first, *_, told, curl = lines(log)
        assert first == f"vllm-metal: starting; the log is {file}"
        assert server.url in told and "512 tokens" in told and len(lines(log)) <= 12
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True)
        assert '"choices":[' in answer.stdout
        assert "Application startup complete" in file.read_text()


@pytest.fixture
def damaged(long_texts, tmp_path):
    """A model with incomplete weights."""
    folder = tmp_path / "model"
    shutil.copytree(long_texts, folder)
    (weights,) = folder.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(10_000)
    return str(folder)


def test_a_start_that_fails_ends_with_the_cause(damaged, tmp_path, unasked):
    log = tmp_path / "terminal"
    assert refused_start(damaged, [], unasked, log) == 1
    (file,) = (tmp_path / "cache" / "logs").glob("serve-*.log")
    named, told = lines(log)
    assert told.startswith(ERROR_PREFIX) and "is cut off" in told
    assert named == f"vllm-metal: starting; the log is {file}"
    assert "Traceback" in file.read_text() and "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_script_gets_the_cause_as_one_error(damaged, unasked):
    script = (
        "from vllm import LLM\n"
        "from vllm_metal.patches.vllm_patches.start_failures import StartError\n"
        "try:\n"
        f"    LLM({damaged!r})\n"
        "except StartError as error:\n"
        "    print('caught:', error)\n"
    )
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as it is on Linux unasked
    variables = {name: value for name, value in (os.environ | unasked).items() if value} | apart
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "is cut off" in ended.stdout.splitlines()[-1]
    assert "Traceback" not in ended.stdout + ended.stderr
