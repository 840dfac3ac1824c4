# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor` as a user types it, on a machine without Metal."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from cli.doctor.conftest import ignore

from metal_kernels.selfcheck import KERNELS
from vllm_metal.cli.doctor import model
from vllm_metal.cli.main import main
from vllm_metal.settings import envs

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="has a Metal device")

# Without what tests set, and without a ban on bytecode, as some environments have it: vLLM's
# imports take twice as long with it.
_NOT_A_USERS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
)
_ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in _NOT_A_USERS}


def run(
    tmp_path: Path, *options: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict]:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "vllm_metal.cli.main",
        "doctor",
        "--quick",
        "--report",
        report,
    ]
    result = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=_ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
    )
    return result, json.loads(report.read_text())


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch, capsys):
    """Runs the doctor in this process; returns its status, output and report."""

    def run(*options: str, device: str) -> tuple[int, str, dict]:
        monkeypatch.setenv("VLLM_METAL_DEVICE", device)
        report = tmp_path / "report.json"
        status = main(["doctor", "--quick", "--report", str(report), *options])
        return status, capsys.readouterr().out, json.loads(report.read_text())

    return run


def by_name(report: dict) -> dict[str, dict]:
    return {finding["name"]: finding for finding in report["findings"]}


@pytest.mark.slow
def test_runs_all_that_users_do_and_every_kernel_and_writes_a_report(tmp_path: Path):
    result, report = run(tmp_path, MLX_MAX_OPS_PER_BUFFER="100")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "no Metal device" in result.stdout
    for name in KERNELS:
        assert name in result.stdout
    assert str(tmp_path / "report.json") in result.stdout
    assert {outcome["kernel"] for outcome in report["kernels"]} == set(KERNELS)
    assert all(outcome["ok"] for outcome in report["kernels"])
    assert report["versions"]["mlx"].startswith("0.")
    assert report["memory_bytes"]["available"] > 0
    assert report["environment"]["MLX_MAX_OPS_PER_BUFFER"] == "100"
    found = by_name(report)
    assert report["complete"] and report["failed"] == []
    assert {finding["status"] for finding in found.values()} <= {"ok", "warning"}
    assert "MetalPlatform" in found["platform"]["seen"]
    assert "10 tokens" in found["engine, in one process"]["seen"]
    assert " 9 10 11 1" in found["engine's tokens"]["seen"]
    assert "10 of 10" in found["engine's tokens"]["seen"]
    assert "10 tokens streamed" in found["engine, as a server"]["seen"]
    assert any(
        "Memory for the KV cache" in line or "KV cache size" in line
        for line in found["engine, as a server"]["log"]
    )
    assert found["MLX within vLLM"]["status"] == "ok"
    assert "ms after 3 s" in found["a step after the device was idle"]["seen"]
    assert "of mlx-lm's" in found["speed beside mlx-lm"]["seen"]
    engine, alone = report["speed"]["engine"], report["speed"]["mlx-lm"]
    assert engine["num_answer"] == alone["num_answer"] == 64  # as much as any model here holds
    assert min(engine["decode"], engine["prefill"], alone["decode"], alone["prefill"]) > 0
    assert engine["pool_tokens"] > 512 and engine["step_after_idle_seconds"] > 0
    assert report["machine"]["wheels"]["mlx"].startswith("cp")
    order = [finding["name"] for finding in report["findings"]]
    assert order.index("MLX") < order.index("engine, in one process") < order.index("kernels")
    assert order.index("platform") < order.index("MLX within vLLM")


@pytest.mark.slow
def test_a_failing_engine_is_the_exit_status_and_is_named(tmp_path: Path):
    with model.made_on_the_spot(ignore) as made:
        weights = Path(made.argument) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        result, report = run(tmp_path, "--only", "engine", "--model", made.argument)
    assert result.returncode == 1
    assert report["failed"] == ["engine, in one process", "engine, as a server"]
    assert "Failed: engine, in one process, engine, as a server" in result.stdout
    for name in report["failed"]:
        found = by_name(report)[name]
        assert "while loading the model: ModelLoadError" in found["seen"]
        assert "model.safetensors" in found["seen"]
        assert found["advice"] and found["log"]
    assert "| " in result.stdout  # its last lines
    assert "kernels" not in report


def test_a_kernel_that_fails_is_the_exit_status_and_the_report_tells_no_names(tmp_path: Path):
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    broken = home / "clang"  # compiles nothing
    log = "\n".join([f"{home}/kernel.cpp: error: planted", "note: line after line", "the last one"])
    broken.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{log}\nEND\nexit 1\n")
    broken.chmod(0o755)
    result, report = run(
        tmp_path,
        *("--only", "kernels"),
        HOME=str(home),
        VLLM_METAL_CACHE=str(home / "cache"),
        VLLM_METAL_CLANG=str(broken),
    )
    assert result.returncode == 1
    assert "kv_write failed" in result.stdout
    assert by_name(report)["kernels"]["seen"].endswith(" failed, in 3 kinds of layer")
    assert all(not outcome["ok"] for outcome in report["kernels"])
    assert "error: planted" in report["kernels"][0]["detail"]
    assert "the last one" not in report["kernels"][0]["detail"]
    assert "the last one" in report["kernels"][0]["log"]  # the compiler's whole text
    assert "jane" not in json.dumps(report)


def test_without_an_interpreter_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("VLLM_METAL_CLANG", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = tmp_path / "report.json"
    assert main(["doctor", "--report", str(report), "--only", "kernels"]) == 0
    folder = Path(__file__).parents[3] / "interpreter"
    said = " ".join(capsys.readouterr().out.split())  # lines are broken to fit
    # By pip, or by uv where the module of advice was imported without pip in sight.
    assert re.search(rf"pip install (--python \S+ )?{re.escape(shlex.quote(str(folder)))} ", said)
    assert "not run" in json.loads(report.read_text())["kernels"]


def test_a_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", "--report", str(tmp_path / "absent" / "report.json")]) == 1
    said = capsys.readouterr()
    assert "absent" in said.err and said.err.count("\n") == 1
    assert said.out == ""  # at once


def test_where_the_plugin_does_not_apply_it_says_how_to_try(run_here):
    status, said, _ = run_here("--only", "engine", device="off")
    assert status == 0
    assert "VLLM_METAL_DEVICE=off turns the plugin off" in said


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac the plugin applies by itself")
def test_where_it_is_no_mac_it_says_how_to_try(run_here, monkeypatch):
    monkeypatch.setattr(envs, "version", lambda name: "0.33.0")  # a vLLM with compiled parts
    status, said, report = run_here("--only", "engine", device="auto")
    assert status == 0
    assert "VLLM_METAL_DEVICE=cpu vllm-metal doctor" in " ".join(said.split())
    assert by_name(report)["engine"]["status"] == "warning"


def test_a_bad_setting_is_named_and_no_engine_is_tried(run_here):
    status, _, report = run_here("--only", "engine", device="gpu")
    assert status == 1
    assert report["failed"] == ["settings"]
    assert "not tried" in by_name(report)["engine"]["seen"]
