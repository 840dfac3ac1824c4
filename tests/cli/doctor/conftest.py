# SPDX-License-Identifier: Apache-2.0
"""Processes that behave like the doctor's children, or misbehave."""

import importlib
import sys
from collections import ChainMap

import pytest
from device.conftest import script  # noqa: F401 (a fixture, which pytest finds here)

from vllm_metal.device.child import ChildResult, parse_message


def ignore(stage: str) -> None:
    """Discards progress."""


def ended(status: int | None = 0, lines: tuple[str, ...] = (), **reported: object) -> ChildResult:
    """Returns the result of an imaginary process."""
    return ChildResult(status, seconds=1.0, lines=lines, reported=reported)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Replaces `child.run` by running the child's main in this process.

    This process has already imported vLLM, which takes most of such a process's time.
    """

    def run(command, progress, environment=None, limits=None) -> ChildResult:
        program, _, dash_m, module, *arguments = command
        assert (program, dash_m) == (sys.executable, "-m")
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # children set it themselves
            patch.setattr(sys, "argv", [module, *arguments])
            importlib.import_module(module).main()
        messages = map(parse_message, capsys.readouterr().out.splitlines())
        return ended(**dict(ChainMap(*reversed([message or {} for message in messages]))))

    return run
