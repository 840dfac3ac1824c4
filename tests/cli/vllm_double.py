# SPDX-License-Identifier: Apache-2.0
"""A fake vLLM package for servers that a command starts."""

from __future__ import annotations

from pathlib import Path


def write_vllm(folder: Path, main: str) -> None:
    """Writes the package so that processes with the folder in PYTHONPATH find it first.

    Args:
        folder: parent folder of the package.
        main: source of vLLM's command module, with its `main`.
    """
    entrypoints = folder / "vllm" / "entrypoints"
    for module, text in (("cli/main", main), ("launchers/launcher", "")):
        path = entrypoints / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in (entrypoints.parent, entrypoints):
        (package / "__init__.py").touch()
