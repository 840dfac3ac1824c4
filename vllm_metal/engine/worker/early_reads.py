# SPDX-License-Identifier: Apache-2.0
"""Decides whether a step's tokens are read before the next step is submitted to the device.

Tokens may be returned once an evaluation that began after their step ended has succeeded (see
`device.errors`). The next submission is such an evaluation if the host has read the tokens before
it; otherwise the check takes a command buffer of its own. If the host is slower than the device,
the tokens are ready and an early read costs nothing. If the device is slower, it would run idle
meanwhile, so tokens are read after the submission and the device runs the check between two steps.
"""

from __future__ import annotations

from vllm_metal.engine.batch.outputs import StepOutput

#: A read that takes longer has waited for the device.
WAIT_S = 50e-6
#: Quick reads in a row before one is early: at first, and at most.
FIRST, MOST = 8, 1024


class EarlyReads:
    """Reads a step's tokens before or after the next submission.

    If an early read has to wait for the device, twice as many reads in a row must not have waited
    before the next early one.
    """

    def __init__(self) -> None:
        self._needed = FIRST
        self._quick = 0  # latest reads in a row that did not wait
        self._newest: StepOutput | None = None  # the step submitted last

    @property
    def due(self) -> bool:
        """Whether the newest step's tokens are to be read before the next submission."""
        return self._quick >= self._needed

    def before_submit(self, newest: StepOutput | None, ended: bool) -> None:
        """Reads the tokens of the newest submitted step, if an early read is `due`.

        `ended` says that the host has already waited for the step.
        """
        if self._newest is not None and self._newest.wait_s is not None:
            self._record_wait(self._newest.wait_s)
        self._newest = newest
        if newest is not None and newest.sampled is not None and (ended or self.due):
            newest.token_ids()

    def after_submit(self) -> None:
        """Marks the step whose tokens were read before this submission as free of errors."""
        if self._newest is not None and self._newest.wait_s is not None:
            self._newest.checked = True

    def _record_wait(self, seconds: float) -> None:
        if seconds <= WAIT_S:
            self._quick += 1
            return
        if self.due:
            self._needed = min(2 * self._needed, MOST)
        self._quick = 0
