# SPDX-License-Identifier: Apache-2.0
"""Processes that behave like our children, or misbehave."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[[str], tuple[str, ...]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Returns a function that makes a command from Python code."""

    def make(text: str) -> tuple[str, ...]:
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"from vllm_metal.device.child import send_message\n{text}")
        return (sys.executable, str(path))

    return make
