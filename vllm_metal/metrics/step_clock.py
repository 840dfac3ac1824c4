# SPDX-License-Identifier: Apache-2.0
"""How long steps take the host and the device, without a wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Times of one step, filled in as it goes on; seconds, by the clock where they are moments."""

    handed_over: float  # when its hand-over to the device began
    host_seconds: float = 0.0  # of laying it out and handing it over
    accepted_known: float | None = None  # when the host had its tokens


class StepClock:
    """Times the steps of one engine, which are laid out, handed over and known in this order.

    Host time is that of the worker's two calls for a step. It leaves out the wait for the step
    before where drafts follow its tokens. It has in it the other waits of a call: for drafts of a
    network, and for the step before where MLX's scatter writes the pool (the CPU device).

    Device time runs from the begin of a step's hand-over, or from the end of the step before where
    that is later, until the host has the step's tokens. So it is the most that the device took:
    where the host comes late for the tokens, it is the host's time. Steps that sample nothing are
    not seen to end, and are measured together with the next one that does.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            now: the clock, in seconds.
        """
        self._now = now
        self._host = 0.0  # of the step that is being laid out
        self._waited = 0.0  # ever
        self._newest: StepTimes | None = None  # the step handed over last
        self._unseen: float | None = None  # hand-over of the first step that was not seen to end
        self._last_end = float("-inf")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Stands around the layout of a step, which may turn out to have nothing scheduled."""
        self._host = 0.0
        with self._on_host():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stands around what may wait for the tokens of the step before: not the host's time."""
        began = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - began

    def accepted_known(self) -> None:
        """The host has the tokens of the step that was handed over last."""
        if self._newest is not None and self._newest.accepted_known is None:
            self._newest.accepted_known = self._now()

    @contextmanager
    def submitting(self) -> Iterator[StepTimes]:
        """Stands around the hand-over of the step that was laid out last."""
        step = StepTimes(self._now())
        with self._on_host():
            yield step
        step.host_seconds = self._host
        self._newest = step

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        began, waited = self._now(), self._waited
        try:
            yield
        finally:
            self._host += self._now() - began - (self._waited - waited)

    def end(self, step: StepTimes, sampled: bool) -> float | None:
        """The host has a step's results.

        Args:
            step: the oldest that has not ended.
            sampled: whether tokens are among the results.

        Returns:
            Seconds that the device took; None where nothing was sampled.
        """
        began = step.handed_over if self._unseen is None else self._unseen
        if not sampled:
            self._unseen = began
            return None
        ended = self._now() if step.accepted_known is None else step.accepted_known
        seconds = max(0.0, ended - max(began, self._last_end))
        self._unseen, self._last_end = None, ended
        return seconds

    def drop(self) -> None:
        """A step failed: what is in flight is lost, and what comes next starts now."""
        self._unseen, self._last_end = None, self._now()
