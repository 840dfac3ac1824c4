# SPDX-License-Identifier: Apache-2.0
"""Bell: how the worker's threads have the engine make a step for them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WakeEvent:
    """Rung by the worker's side, heard by the scheduler's; every method is for any thread.

    Both sides hold the same one where they are in one process. Pickled it becomes another, which
    nobody hears: a worker in a process of its own cannot wake the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], bool] | None = None
        self._rung = False

    def __reduce__(self) -> tuple[type[WakeEvent], tuple[()]]:
        return WakeEvent, ()

    def connect(self, wake: Callable[[], bool]) -> None:
        """Somebody hears it from now on.

        Args:
            wake: has the engine look whether it was rung; False: it does not look any more.
        """
        with self._lock:
            self._wake = wake

    @property
    def is_heard(self) -> bool:
        """Whether a step follows when it is rung."""
        return self._wake is not None

    @property
    def is_rung(self) -> bool:
        """Whether a step is due."""
        return self._rung

    def ring(self) -> None:
        """A step is due."""
        with self._lock:
            if not self._rung and self._wake is not None:
                self._rung = True
                self._rung = self._wake()

    def silence(self) -> None:
        """The step begins that was due, or there can be none."""
        with self._lock:
            self._rung = False
