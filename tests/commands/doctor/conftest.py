# SPDX-License-Identifier: Apache-2.0
"""Processes that behave as the doctor's own children, or misbehave."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_metal.commands.doctor.child import Ended

Script = Callable[[str], tuple[str, ...]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a command of a Python text."""

    def make(text: str) -> tuple[str, ...]:
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"from vllm_metal.commands.doctor.child import say\n{text}")
        return (sys.executable, str(path))

    return make


def ignore(stage: str) -> None:
    """Progress that nobody reads."""


def ended(status: int | None = 0, lines: tuple[str, ...] = (), **told: object) -> Ended:
    """How a process ended that never was."""
    return Ended(status, seconds=1.0, lines=lines, told=told)
