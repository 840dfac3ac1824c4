# SPDX-License-Identifier: Apache-2.0
"""Processes that behave as the doctor's own children, or misbehave."""

from device.conftest import script  # noqa: F401 (a fixture, which pytest finds here)

from vllm_metal.device.child import Ended


def ignore(stage: str) -> None:
    """Progress that nobody reads."""


def ended(status: int | None = 0, lines: tuple[str, ...] = (), **told: object) -> Ended:
    """How a process ended that never was."""
    return Ended(status, seconds=1.0, lines=lines, told=told)
