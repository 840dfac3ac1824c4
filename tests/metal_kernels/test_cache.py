# SPDX-License-Identifier: Apache-2.0
"""One folder for all that is kept, and its removal."""

import ast
import os
import subprocess
from pathlib import Path

from metal_kernels import cache

ROOT = Path(__file__).parents[2]


def names_in_use():
    """Each X of `cache_dir() / "X"` in the sources and the tests."""
    for folder in ("vllm_metal", "metal_kernels", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.BinOp)
                    and isinstance(node.op, ast.Div)
                    and isinstance(node.right, ast.Constant)
                    and ast.unparse(node.left).endswith("cache_dir()")
                ):
                    yield node.right.value


def test_every_part_is_listed():
    assert sorted(set(names_in_use())) == sorted(cache.PARTS)


def test_distclean_removes_our_parts_and_the_environment_and_says_so(tmp_path):
    clone, kept = tmp_path / "clone", tmp_path / "our cache"
    for path in ("scripts/distclean.sh", "metal_kernels/cache.py"):
        (clone / path).parent.mkdir(parents=True)
        (clone / path).write_bytes((ROOT / path).read_bytes())
    for folder in (clone / ".venv", kept / "models" / "one", kept / "interpreter", kept / "mine"):
        folder.mkdir(parents=True)
    (kept / "models" / "one" / "weights").write_bytes(bytes(10000))

    def distclean():
        return subprocess.run(
            ["bash", "scripts/distclean.sh"],
            cwd=clone,
            env=os.environ | {"VLLM_METAL_CACHE": str(kept)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    said = distclean()
    for removed in (kept / "models", kept / "interpreter", ".venv"):
        assert f"removing {removed} (" in said
    assert [path.name for path in kept.iterdir()] == ["mine"]
    assert not (clone / ".venv").exists()
    assert distclean() == ""
    (kept / "mine").rmdir()
    (kept / "selfcheck").mkdir()
    distclean()
    assert not kept.exists()
