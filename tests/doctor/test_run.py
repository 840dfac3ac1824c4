# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor` as a user types it, on a machine without Metal."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from metal_kernels.paged_attention import unsupported
from metal_kernels.selfcheck import KERNELS, in_use
from vllm_metal import doctor
from vllm_metal.cli import main

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="has a Metal device")


def run(tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "vllm_metal.cli", "doctor", "--quick", "--report", report]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )
    return result, json.loads(report.read_text())


def test_runs_every_kernel_and_writes_a_report(tmp_path: Path):
    result, report = run(tmp_path, MLX_MAX_OPS_PER_BUFFER="100")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no Metal device" in result.stdout
    for name in KERNELS:
        assert name in result.stdout
    assert str(tmp_path / "report.json") in result.stdout
    assert {outcome["kernel"] for outcome in report["kernels"]} == set(KERNELS)
    assert all(outcome["ok"] for outcome in report["kernels"])
    assert report["versions"]["mlx"].startswith("0.")
    assert report["memory_bytes"]["available"] > 0
    assert report["environment"]["MLX_MAX_OPS_PER_BUFFER"] == "100"


def test_a_kernel_that_fails_is_the_exit_status_and_the_report_tells_no_names(tmp_path: Path):
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    broken = home / "clang"  # compiles nothing
    broken.write_text(f"#!/bin/sh\necho '{home}/kernel.cpp: error: planted' >&2\nexit 1\n")
    broken.chmod(0o755)
    result, report = run(
        tmp_path,
        HOME=str(home),
        VLLM_METAL_CACHE=str(home / "cache"),
        VLLM_METAL_CLANG=str(broken),
    )
    assert result.returncode == 1
    assert "kv_write failed" in result.stdout
    assert all(not outcome["ok"] for outcome in report["kernels"])
    assert "error: planted" in report["kernels"][0]["detail"]
    assert "jane" not in json.dumps(report)


def test_without_an_interpreter_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("VLLM_METAL_CLANG", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = tmp_path / "report.json"
    assert main(["doctor", "--report", str(report)]) == 0
    assert "pip install 'vllm-metal[interpreter]'" in capsys.readouterr().out
    assert "not run" in json.loads(report.read_text())["kernels"]


def test_a_report_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("VLLM_METAL_CLANG", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--report", str(tmp_path / "absent" / "report.json")]) == 1
    assert "absent" in capsys.readouterr().err


def test_the_matrix_is_of_kernels_that_exist():
    cases = doctor.all_cases()
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert unsupported(case.shape, case.dtype, case.block_size) is None, case
    for cases in (doctor.all_cases(), doctor.quick_cases()):
        assert {name for case in cases for name in in_use(case)} == set(KERNELS)
    sizes = {(case.shape.head_size, case.dtype, case.cache_dtype) for case in doctor.all_cases()}
    assert len(sizes) == 8 * 3 * 3
