# SPDX-License-Identifier: Apache-2.0
"""Installs schemas published as npm packages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def install(folder: Path, *packages: str) -> None:
    """Installs packages into a folder's `node_modules`; skips the test if they are unavailable.

    Args:
        folder: folder of the test.
        packages: name@version.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed: nothing reads the published schema")
    (folder / "package.json").write_text("{}")
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm does not get {' and '.join(packages)}: {done.stderr[-300:]}")
