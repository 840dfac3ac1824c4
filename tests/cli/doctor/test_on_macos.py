# SPDX-License-Identifier: Apache-2.0
"""The doctor under the macOS test double."""

import json
from pathlib import Path

from darwin.run import run


def findings(report: Path) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(report.read_text())["findings"]}


def test_the_first_releases_of_macos_26_are_warned_of_and_rosetta_fails(tmp_path: Path):
    report = tmp_path / "report.json"
    command = [
        "-m",
        "vllm_metal.cli.main",
        "doctor",
        "--only",
        "machine",
        "--report",
        str(report),
    ]
    result = run(command, timeout=120, DARWIN_DOUBLE_RELEASE="26.1")
    assert result.returncode == 0, result.stdout + result.stderr
    found = findings(report)
    assert found["system"]["status"] == "warning" and "26.1" in found["system"]["seen"]
    assert "macosx_15_0_arm64" in result.stdout
    assert found["GPU driver"]["status"] == "warning"
    wired = json.loads(report.read_text())["wired_bytes"]
    assert min(wired["before"], wired["after"]) > 0
    reported = json.loads(report.read_text())["machine"]
    assert reported["sw_vers"] == []  # the double has no such command
    assert reported["memory_bytes"] > 2**30
    assert reported["wired_limit_mb"] is None  # the double's kernel has no such number
    full = {"DARWIN_DOUBLE_AVAILABLE": "1000000000", "DARWIN_DOUBLE_FILES": "0"}
    full["DARWIN_DOUBLE_LEVEL"] = "3"
    result = run(command, timeout=120, DARWIN_DOUBLE_ROSETTA="1", **full)
    assert result.returncode == 1
    found = findings(report)
    assert "Rosetta" in found["processor"]["seen"]
    assert found["memory"]["status"] == "warning"
