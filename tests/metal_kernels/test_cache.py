# SPDX-License-Identifier: Apache-2.0
"""The cache folder and its removal."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from metal_kernels import cache

ROOT = Path(__file__).parents[2]


def names_in_use():
    """Returns each X of `cache_dir() / "X"` in the sources and the tests."""
    sources = ("vllm_metal", "metal_kernels", "interpreter", "examples", "benchmarks")
    for folder in (*sources, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "cache_dir() / " in text else ():
                if (
                    isinstance(node, ast.BinOp)
                    and isinstance(node.op, ast.Div)
                    and isinstance(node.right, ast.Constant)
                    and ast.unparse(node.left).endswith("cache_dir()")
                ):
                    yield node.right.value


def test_every_part_is_listed():
    of_earlier_versions = {"source-archives", "vllm-tests"}
    assert sorted({*names_in_use(), *of_earlier_versions}) == sorted(cache.PARTS)


@pytest.fixture
def clone(tmp_path):
    """A clone, as far as `make distclean` is concerned."""
    clone = tmp_path / "clone"
    for path in ("scripts/distclean.sh", "metal_kernels/cache.py"):
        (clone / path).parent.mkdir(parents=True)
        (clone / path).write_bytes((ROOT / path).read_bytes())
    (clone / ".venv").mkdir()
    return clone


def distclean(clone, **variables):
    inherited = {key: value for key, value in os.environ.items() if key != "VLLM_METAL_CACHE"}
    return subprocess.run(
        ["bash", "scripts/distclean.sh"],
        cwd=clone,
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's cache folder is not to be moved")
def test_distclean_removes_our_parts_and_the_environment_and_says_so(clone, tmp_path):
    base = tmp_path / "a cache"
    kept = base / "vllm-metal"
    for folder in (kept / "models" / "one", kept / "interpreter", kept / "mine"):
        folder.mkdir(parents=True)
    (kept / "models" / "one" / "weights").write_bytes(bytes(10000))
    said = distclean(clone, XDG_CACHE_HOME=str(base)).stdout
    for removed in (kept / "models", kept / "interpreter", ".venv"):
        assert f"removing {removed} (" in said
    assert [path.name for path in kept.iterdir()] == ["mine"]
    assert not (clone / ".venv").exists()
    assert distclean(clone, XDG_CACHE_HOME=str(base)).stdout == ""
    (kept / "mine").rmdir()
    (kept / "selfcheck").mkdir()
    distclean(clone, XDG_CACHE_HOME=str(base))
    assert not kept.exists() and base.exists()


def test_distclean_leaves_a_folder_of_the_user_s_choice_alone(clone, tmp_path):
    """Its `models` may be the user's."""
    chosen = tmp_path / "a disk"
    (chosen / "models" / "theirs").mkdir(parents=True)
    said = distclean(clone, VLLM_METAL_CACHE=str(chosen))
    assert (chosen / "models" / "theirs").is_dir() and not (clone / ".venv").exists()
    assert f"kept, because VLLM_METAL_CACHE names it: {chosen / 'models'}" in said.stderr
