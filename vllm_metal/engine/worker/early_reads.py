# SPDX-License-Identifier: Apache-2.0
"""Decides whether a step's tokens are read before the next step is handed to the device.

Tokens may be told once an evaluation that began after their step ended has succeeded (see
`device.errors`). The next hand-over is one where the host has read the tokens before it; else the
check takes a command buffer of its own. A host that is slower than its device finds the tokens
there, so it reads them early for nothing. A device that is slower would run dry meanwhile: tokens
are read after the hand-over, and the device does the check between two steps.
"""

from __future__ import annotations

from vllm_metal.engine.batch.outputs import StepOutput

#: A read that takes longer has waited for the device.
WAIT_S = 50e-6
#: Quick reads in a row before one is early: at first, and at most.
FIRST, MOST = 8, 1024


class EarlyReads:
    """Stands around hand-overs; after each early read that waited, asks for twice as many quick."""

    def __init__(self) -> None:
        self._needed = FIRST
        self._quick = 0  # reads in a row, the latest ones
        self._newest: StepOutput | None = None  # the step handed over last

    @property
    def due(self) -> bool:
        """Whether the next read comes before the next hand-over."""
        return self._quick >= self._needed

    def before_submit(self, newest: StepOutput | None, ended: bool) -> None:
        """Reads the tokens of the step that was handed over last, where that is due.

        Args:
            newest: that step; None: there is none.
            ended: whether the host has waited for it in any case.
        """
        if self._newest is not None and self._newest.wait_s is not None:
            self._note(self._newest.wait_s)
        self._newest = newest
        if newest is not None and newest.sampled is not None and (ended or self.due):
            newest.token_ids()

    def after_submit(self) -> None:
        """A hand-over has succeeded: a step whose tokens were read before it has not failed."""
        if self._newest is not None and self._newest.wait_s is not None:
            self._newest.checked = True

    def _note(self, seconds: float) -> None:
        if seconds <= WAIT_S:
            self._quick += 1
            return
        if self.due:
            self._needed = min(2 * self._needed, MOST)
        self._quick = 0
