# SPDX-License-Identifier: Apache-2.0
"""The wheel's requirements, the lock files' pins and the tested vLLM agree."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from vllm_metal.patches.vllm_patches import releases

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [spec for specs in PROJECT["optional-dependencies"].values() for spec in specs]
ASKED = [Requirement(spec) for spec in PROJECT["dependencies"] + EXTRAS if "{root" not in spec]


def pinned(lock):
    """Returns versions by package of one lock file."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def test_our_version_is_the_served_vllm_and_a_number_of_ours():
    *vllm, ours = PROJECT["version"].removesuffix(".dev0").split(".")
    assert int(ours) > 0 and len(vllm) == 3
    assert releases.is_tested(".".join(vllm))
    pin = (ROOT / "requirements" / "vllm.txt").read_text()
    assert f"\nvllm=={'.'.join(vllm)} --hash" in pin
    wheels = re.findall(r"vllm_metal-([^-]+)-py3", (ROOT / "docs" / "install.md").read_text())
    assert set(wheels) == {PROJECT["version"]}


@pytest.mark.parametrize("lock", ["linux", "linux-dev", "macos", "macos-dev"])
def test_each_pin_has_the_hashes_of_its_files(lock):
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    hashed = re.findall(r"^([\w.-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\b", text, re.MULTILINE)
    # Where the CPU build of torch is, users say.
    assert sorted(set(pinned(lock)) - set(hashed)) == (["torch"] if lock == "linux" else [])


@pytest.mark.parametrize("lock", ["linux", "macos"])
def test_lock_files_pin_what_the_wheel_asks_for(lock):
    pins = pinned(lock) | {
        name: version for name, version in pinned(f"{lock}-dev").items() if name not in pinned(lock)
    }
    system = {"linux": "linux", "macos": "darwin"}[lock]
    for asked in ASKED:
        if asked.marker and not asked.marker.evaluate({"sys_platform": system}):
            continue
        assert asked.name in pins, asked
        assert Version(pins[asked.name]) in asked.specifier, asked


def test_both_lock_files_pin_the_same_mlx_and_mlx_lm():
    for name in ("mlx", "mlx-lm", "transformers"):
        assert pinned("linux")[name] == pinned("macos")[name]


def test_mlx_is_pinned_to_the_release_that_the_checklist_was_read_against():
    checklist = (ROOT / "docs" / "metal-checklist.md").read_text()
    read = re.search(
        r"\*\*([\d.]+)\*\* means that the fact was read from that\s+release", checklist
    )
    assert read.group(1) == pinned("macos")["mlx"]
