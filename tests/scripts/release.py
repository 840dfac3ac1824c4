# SPDX-License-Identifier: Apache-2.0
"""Builds releases for tests: runs scripts/dist.sh on a copy of the files it reads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PARTS = (
    *(".gitignore", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"),
    *("vllm_metal", "metal_kernels", "requirements", "scripts", "deploy", "examples"),
)


def copy_clone(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for part in _PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    return folder


def make(clone: Path, address: str = "") -> Path:
    """Makes a release of this clone; returns its folder. Uses this environment's hatchling."""
    pytest.importorskip("hatchling", reason="make setup installs it")
    env = os.environ | {"PYTHON": sys.executable, "ADDRESS": address}
    subprocess.run(["bash", "scripts/dist.sh"], cwd=clone, env=env, check=True, timeout=300)
    return clone / "dist"
