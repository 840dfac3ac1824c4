# SPDX-License-Identifier: Apache-2.0
"""The report is complete at every moment, and contains no user names."""

import json
import os
import platform
from pathlib import Path

import pytest

from vllm_metal.cli.doctor.report import Finding, Report


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with escaped characters, reached through a link as on macOS."""
    (tmp_path / "private" / "jürgen").mkdir(parents=True)
    (tmp_path / "Users").symlink_to(tmp_path / "private")
    monkeypatch.setenv("HOME", str(tmp_path / "Users" / "jürgen"))
    monkeypatch.setattr(platform, "node", lambda: "juergens-mac.local")
    return Path.home()


def test_the_file_is_whole_after_each_finding(tmp_path: Path):
    path = tmp_path / "report.json"
    report = Report(path)
    assert json.loads(path.read_text())["complete"] is False
    report.add(Finding("one", "ok", "seen"))
    report.add_facts(more=[1])
    found = json.loads(path.read_text())
    assert [finding["name"] for finding in found["findings"]] == ["one"]
    assert found["more"] == [1] and found["complete"] is False
    report.add(Finding("two", "failed", "wrong", "do this", ("a line",)))
    assert json.loads(path.read_text())["failed"] == ["two"]
    assert report.close() == 1
    assert json.loads(path.read_text())["complete"] is True
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_writer_that_is_stopped_leaves_what_was_there(tmp_path: Path, monkeypatch):
    path = tmp_path / "report.json"
    report = Report(path)
    before = path.read_text()

    def stopped(*_):
        assert path.read_text() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        report.add(Finding("one", "ok", "seen"))
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["report.json"]


def test_warnings_alone_are_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = Report(tmp_path / "report.json")
    report.add(Finding("one", "warning", "odd", "look at it"))
    assert report.close() == 0
    said = capsys.readouterr().out
    assert "warning  one: odd" in said and "look at it" in said
    assert "Nothing failed, 1 warning." in said


def test_nothing_tells_who_the_user_is(tmp_path: Path, home: Path, capsys):
    path = tmp_path / "report.json"
    report = Report(path)
    lines = (
        f"{home}/model: not found",
        f"{home.resolve()}/model: not found",
        "/Volumes/Data/jürgen/model: not found",
        "listening on juergens-mac.local, that is juergens-mac, at 192.168.1.23:8000",
        "from jürgen@fe80::1c2d:3a4b at 09:14:10, metal::vec<half, 4>",
    )
    advice = f"run this:\n{home}/venv/bin/python -m pip install x"
    report.add(Finding("one", "failed", f"no {home}/kernel.cpp", advice, lines))
    report.add_facts(kernels=[{"log": f"{home}/a.metal:1: error"}], environment={"A": str(home)})
    report.close()
    text = json.dumps(json.loads(path.read_text()), ensure_ascii=False)
    said = capsys.readouterr().out
    command = f"{home}/venv/bin/python -m pip install x"
    assert command in said and command not in text  # on the terminal it is to be copied
    for words in (text, said.replace(str(path), "").replace(command, "")):
        assert not any(name in words for name in ("jürgen", "juergens-mac", "192.168", "3a4b"))
        assert "at 09:14:10, metal::vec<half, 4>" in words
        assert "~/kernel.cpp" in words and "/Volumes/Data/USER/model" in words
    assert "~/a.metal:1: error" in text


def test_commands_are_printed_on_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    command = f"python -m pip install {' '.join(['--an-option'] * 12)}"
    report = Report(tmp_path / "report.json")
    report.add(Finding("one", "warning", "odd", f"{'Some words. ' * 12}\n{command}"))
    lines = capsys.readouterr().out.splitlines()
    assert sum(command in line for line in lines) == 1
    assert all(len(line) <= 60 for line in lines if command not in line)


def test_no_secret_of_the_environment_is_told(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh123")
    monkeypatch.setenv("A_SHORT_KEY", "on")  # a part of words
    path = tmp_path / "report.json"
    report = Report(path)
    report.add(Finding("one", "failed", "seen", log=("token=hf_abcdefgh123, on and on",)))
    assert "hf_abcdefgh123" not in path.read_text()
    assert "token=SECRET, on and on" in path.read_text()
