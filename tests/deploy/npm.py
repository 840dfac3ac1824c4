# SPDX-License-Identifier: Apache-2.0
"""Schemas that others publish as packages of npm's registry, fetched when a test asks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_metal.settings import envs


def installed(**packages: str) -> Path:
    """A folder whose `node_modules` has the packages; skips the test where they are not to be had.

    Args:
        packages: versions by name, with `__` for the slash of a scope, and `_` for a hyphen.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed: nothing reads the published schema")
    names = [_name(key) + "@" + version for key, version in packages.items()]
    folder = envs.cache_dir() / "npm" / "-".join(names).replace("/", "-").replace("@", "")
    if not (folder / "package-lock.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *names]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm does not get {', '.join(names)}: {done.stderr[-300:]}")
    return folder


def _name(key: str) -> str:
    scope, _, name = key.rpartition("__")
    return f"@{scope}/{name}".replace("_", "-") if scope else name.replace("_", "-")
