# SPDX-License-Identifier: Apache-2.0
"""WakeEvent lets the worker's threads make the engine run a step."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WakeEvent:
    """Set by the worker's side, observed by the scheduler's; thread-safe.

    Both sides share one object within a process. A pickled copy is unconnected, as a worker in a
    process of its own cannot wake the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], bool] | None = None
        self._is_set = False

    def __reduce__(self) -> tuple[type[WakeEvent], tuple[()]]:
        return WakeEvent, ()

    def connect(self, wake: Callable[[], bool]) -> None:
        """Sets the function that makes the engine check the event; it returns False at shutdown."""
        with self._lock:
            self._wake = wake

    @property
    def is_connected(self) -> bool:
        """Whether setting the event leads to a step."""
        return self._wake is not None

    @property
    def is_set(self) -> bool:
        """Whether a step is due."""
        return self._is_set

    def set(self) -> None:
        with self._lock:
            if not self._is_set and self._wake is not None:
                self._is_set = True
                self._is_set = self._wake()

    def clear(self) -> None:
        """Clears the event when the requested step begins, or when no step is possible."""
        with self._lock:
            self._is_set = False
