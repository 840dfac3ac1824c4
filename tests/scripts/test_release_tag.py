# SPDX-License-Identifier: Apache-2.0
"""Errors of invalid release tags, and notes from the changelog."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = """\
# Changelog

## [Unreleased]

- later

## [0.32.0.2] - 2026-12-01

### Fixed

- a fault

## [0.32.0.1] - 2026-11-01

- the first
"""


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release_tag.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path):
    """Sources of 0.32.0.2 over vLLM 0.32.0; `change` rewrites one of their files."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "vllm.txt").write_text("# vLLM\nvllm==0.32.0\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.32.0.2"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def replace(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_tag_of_the_sources_is_a_release_with_its_own_notes(release, clone):
    assert release.problems(clone, "v0.32.0.2") == []
    assert release.notes(clone, "v0.32.0.2") == "### Fixed\n\n- a fault"
    assert release.notes(clone, "v0.32.0.1") == "- the first"


@pytest.mark.parametrize(
    ("file", "old", "new", "tag", "said"),
    [
        ("pyproject.toml", "0.32.0.2", "0.32.0.3", "v0.32.0.2", "tag v0.32.0.3"),
        ("pyproject.toml", "0.32.0.2", "0.32.0.2", "0.32.0.2", "tag v0.32.0.2"),
        ("pyproject.toml", "0.32.0.2", "0.32.0.2.dev0", "v0.32.0.2.dev0", "is no release"),
        ("pyproject.toml", "0.32.0.2", "0.32.2", "v0.32.2", "is no release"),
        ("requirements/vllm.txt", "0.32.0", "0.33.0", "v0.32.0.2", "does not begin"),
        ("requirements/vllm.txt", "vllm==0.32.0", "six", "v0.32.0.2", "does not begin"),
        ("CHANGELOG.md", "0.32.0.2", "0.32.0.20", "v0.32.0.2", "CHANGELOG.md has nothing"),
        ("CHANGELOG.md", "### Fixed\n\n- a fault\n", "", "v0.32.0.2", "CHANGELOG.md has nothing"),
    ],
)
def test_another_tag_says_why_it_is_none(release, clone, file, old, new, tag, said):
    replace(clone / file, old, new)
    assert any(said in problem for problem in release.problems(clone, tag))


def test_the_command_says_what_the_workflow_needs(release, clone, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", clone)
    assert release.main("check", "v0.32.0.2") == 0
    assert release.main("notes", "v0.32.0.2") == 0
    assert capsys.readouterr().out == "### Fixed\n\n- a fault\n"
    shutil.rmtree(clone / "requirements")
    (clone / "requirements").mkdir()
    (clone / "requirements" / "vllm.txt").write_text("vllm==0.33.0\n")
    assert release.main("check", "v0.32.0.2") == 1
    assert "release: " in capsys.readouterr().err
