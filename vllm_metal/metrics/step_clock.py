# SPDX-License-Identifier: Apache-2.0
"""Measures host and device times of steps without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Times of one step in seconds, filled in as it proceeds."""

    handed_over: float  # time at which its submission to the device began
    host_seconds: float = 0.0  # time to prepare and submit
    accepted_known: float | None = None  # time at which the host had its tokens


class StepClock:
    """Times the steps of one engine, which are prepared, submitted and completed in this order.

    Device time is an upper bound: from the start of a step's submission, or the end of the step
    before if that is later, until the host has the step's tokens.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        # Host time of the worker's two calls for the current step. It excludes the wait for the
        # previous step if drafts follow that step's tokens. It includes other waits of a call: for
        # drafts of a network, and for the previous step if MLX's scatter writes the pool (on the
        # CPU device).
        self._host = 0.0
        self._waited = 0.0  # total of all `waiting`
        self._newest: StepTimes | None = None  # the step submitted last
        # Submission time of the first step without a visible end. Such steps sample nothing, and
        # are measured together with the next step that does.
        self._unseen: float | None = None
        self._last_end = float("-inf")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Measures the preparation of a step in the block; the step may turn out to be empty."""
        self._host = 0.0
        with self._on_host():
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Excludes the block, which may wait for the previous step's tokens, from host time."""
        began = self._now()
        try:
            yield
        finally:
            self._waited += self._now() - began

    def accepted_known(self) -> None:
        """Notes that the host has the tokens of the step submitted last."""
        if self._newest is not None and self._newest.accepted_known is None:
            self._newest.accepted_known = self._now()

    @contextmanager
    def submitting(self) -> Iterator[StepTimes]:
        """Measures the submission of the step prepared last."""
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
        """Records a step's end; returns its device seconds, or None if it sampled nothing.

        `step` is the oldest that has not ended.
        """
        began = step.handed_over if self._unseen is None else self._unseen
        if not sampled:
            self._unseen = began
            return None
        # If the host is late to read the tokens, this is the host's time.
        ended = self._now() if step.accepted_known is None else step.accepted_known
        seconds = max(0.0, ended - max(began, self._last_end))
        self._unseen, self._last_end = None, ended
        return seconds

    def drop(self) -> None:
        """Restarts timing after a failed step, with which all steps in flight are lost."""
        self._unseen, self._last_end = None, self._now()
