# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md says what the pins, the sources and the scheduled job say."""

import re
import tomllib
from pathlib import Path

import pytest
from upstream import archive
from vllm_patches import unpatched

from vllm_metal.vllm_patches import releases

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATCHES = ROOT / "vllm_metal" / "vllm_patches"


def rows(heading):
    """Cells of the table under a heading, without its header."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


VERSIONS = {name: cells for name, *cells in rows("Versions")}


def test_vllm_is_the_release_that_is_not_refused():
    assert VERSIONS["vLLM"][0] == releases.TESTED_VLLM
    assert archive.VERSION.startswith(f"{releases.TESTED_VLLM}.")


@pytest.mark.parametrize("package", ["mlx", "mlx-lm", "transformers", "torch"])
@pytest.mark.parametrize("lock", ["linux", "macos"])
def test_tested_is_what_the_lock_files_pin(package, lock):
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    (pinned,) = re.findall(rf"^{package}==([\d.]+)", text, re.MULTILINE)
    assert VERSIONS[package if package != "mlx" else "MLX"][0] == pinned


def test_what_pip_refuses_is_what_the_wheel_asks_for():
    asked = [spec.partition(";")[0].strip() for spec in PROJECT["dependencies"]]
    mlx = VERSIONS["MLX"][0]
    assert f"mlx=={mlx}" in asked and f"mlx[cpu]=={mlx}" in asked
    for package in ("mlx-lm", "transformers"):
        oldest, newest = re.search(
            r"before ([\d.]+) and from ([\d.]+) on", VERSIONS[package][1]
        ).groups()
        assert f"{package}>={oldest},<{newest}" in asked
    oldest = VERSIONS["Python on Linux"][0]
    assert PROJECT["requires-python"] == f">={oldest}"


def test_mlx_is_pinned_to_the_release_that_the_checklist_was_read_against():
    checklist = (ROOT / "docs" / "metal-checklist.md").read_text()
    read = re.search(r"\*\*([\d.]+)\*\* marks what was read off that\s+release itself", checklist)
    assert read.group(1) == VERSIONS["MLX"][0]


def test_every_patch_has_a_row():
    listed = {row[0].strip("`"): row[1:] for row in rows("What is changed in vLLM, and why")}
    assert listed.keys() == {path.stem for path in PATCHES.glob("*.py")} - unpatched.APART
    assert all(map(all, listed.values()))


@pytest.mark.parametrize("file", ["docs/compatibility.md", ".github/workflows/newest-vllm.yml"])
def test_files_and_modules_that_are_named_exist(file):
    text = (ROOT / file).read_text()
    for path in re.findall(r"[\w./-]*(?:tests|vllm_metal|docs)/[\w/.-]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m ((?:upstream|vllm_metal)[\w.]*)", text):
        path = Path(*module.split("."))
        files = (path.with_suffix(".py"), path / "__main__.py")
        assert any((root / file).exists() for root in (ROOT, ROOT / "tests") for file in files)
