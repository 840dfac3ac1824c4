# SPDX-License-Identifier: Apache-2.0
"""Imports of an engine's processes, and CPUs without AVX-512."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import vllm
from e2e.server import SPAWNED, serve

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
VLLM = str(Path(vllm.__file__).parent)
#: Modules beside vLLM's models that hold none: protocols, their list, and helpers.
NO_MODELS = {
    f"vllm.model_executor.models.{name}"
    for name in (
        *("adapters", "config", "interfaces", "interfaces_base", "module_mapping", "registry"),
        *("utils", "vision"),
    )
}
MODELS = ("vllm.model_executor.models.", "vllm.models.")
QEMU = shutil.which("qemu-x86_64")
OPTIONS = (
    *("--served-model-name", "tiny", "--skip-tokenizer-init", "--max-model-len", "64"),
    *("--max-num-batched-tokens", "64", "--max-num-seqs", "2"),
    *("--kv-cache-memory-bytes", str(1 << 24)),
)
emulated = pytest.mark.skipif(
    QEMU is None or os.uname().machine != "x86_64",
    reason="needs qemu-x86_64 (Debian's package qemu-user) on an x86 machine",
)


def reporting(folder, **variables):
    """Returns the environment of a process that reports into a folder, with its children."""
    folder.mkdir()
    found = [str(HERE / "reporting"), os.environ.get("PYTHONPATH", ""), str(HERE.parents[1])]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, found)), "VLLM_METAL_DEVICE": "cpu"}
    return {**paths, **SPAWNED, "PROCESS_REPORTS": str(folder)} | variables


def reports(folder):
    return [json.loads(path.read_text()) for path in folder.glob("*[0-9]")]


def emulator(folder):
    """Makes a Python that runs on an emulated Haswell (2013, AVX2)."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {QEMU} -cpu Haswell {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def complete(server):
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 1, "temperature": 0}
    body |= {"detokenize": False, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def ask_all(folder):
    """Makes every reporting process that still runs report again."""
    before = time.time()
    running_engines = [path for path in folder.glob("*[0-9]") if Path("/proc", path.name).exists()]
    for path in running_engines:
        os.kill(int(path.name), signal.SIGUSR2)
    deadline = time.monotonic() + 60
    while any(path.stat().st_mtime < before for path in running_engines):
        assert time.monotonic() < deadline, "a process does not report"
        time.sleep(0.2)
    return running_engines


def assert_imports_nothing_of_vllms(told):
    models = [n for n in told["modules"] if n.startswith(MODELS) and n not in NO_MODELS]
    assert not models, told["arguments"]
    assert not [path for path in told["libraries"] if path.startswith(VLLM)], told["arguments"]


def assert_no_avx512(told):
    assert "avx2" in told["features"], told["arguments"]
    assert not [name for name in told["features"] if "avx512" in name], told["arguments"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_a_server_loads_no_library_and_no_model_of_vllms(tiny, tmp_path):
    folder = tmp_path / "reports"
    with serve(tiny, OPTIONS, tmp_path / "log", environment=reporting(folder)) as server:
        assert complete(server)["usage"]["completion_tokens"] == 1
        running_engines = ask_all(folder)
        for path in running_engines:
            assert VLLM not in Path("/proc", path.name, "maps").read_text()
    told = reports(folder)
    assert sum("vllm.v1.engine.core" in each["modules"] for each in told) >= 2
    for each in told:
        assert_imports_nothing_of_vllms(each)


@emulated
def test_an_engine_in_process_runs_without_avx512(tiny, tmp_path):
    python, folder = emulator(tmp_path), tmp_path / "reports"
    variables = reporting(folder, EMULATED_PYTHON=python, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    command = [python, str(HERE / "one_token.py"), tiny]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert "TOKENS" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert reports(folder)
    for told in reports(folder):
        assert_no_avx512(told)
        assert_imports_nothing_of_vllms(told)


@pytest.mark.timeout(1500)
@emulated
def test_a_server_runs_without_avx512(tiny, tmp_path):
    python, folder = emulator(tmp_path), tmp_path / "reports"
    variables = reporting(folder, EMULATED_PYTHON=python, VLLM_RPC_TIMEOUT="300000")
    with serve(
        tiny, OPTIONS, tmp_path / "log", environment=variables, python=python, start_timeout_s=1200
    ) as server:
        assert complete(server)["usage"]["completion_tokens"] == 1
        ask_all(folder)
        told = reports(folder)
    assert sum("vllm.v1.engine.core" in each["modules"] for each in told) >= 2
    for each in told:
        assert_no_avx512(each)
        assert_imports_nothing_of_vllms(each)
