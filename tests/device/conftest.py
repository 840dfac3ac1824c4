# SPDX-License-Identifier: Apache-2.0
"""Processes that behave as children of ours, or misbehave."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[[str], tuple[str, ...]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a command of a Python text."""

    def make(text: str) -> tuple[str, ...]:
        path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"from vllm_metal.device.child import send_message\n{text}")
        return (sys.executable, str(path))

    return make
