# SPDX-License-Identifier: Apache-2.0
"""Keeps a Mac awake while an engine has requests.

An idle Mac on battery sleeps within minutes, in the middle of an agent's run. A closed lid puts it
to sleep regardless.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(__name__)

#: Seconds without a request until the Mac may sleep, so that not every request starts a process.
LINGER = 60.0


class KeepAwake:
    """Runs macOS's `caffeinate` from an engine's first request until a while after its last."""

    def __init__(
        self,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        """`timer` makes a timer from a delay in seconds and a function to call after it."""
        self._make_timer = timer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._failed = False

    def update(self, busy: bool) -> None:
        """Called at every step; `busy` says whether the engine has requests."""
        if busy == (self._process is not None and self._timer is None):
            return
        with self._lock:
            if busy:
                self._stop_timer()
                self._start()
            elif self._process is not None and self._timer is None:
                self._timer = self._make_timer(LINGER, self.close)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        """Lets the Mac sleep."""
        with self._lock:
            self._stop_timer()
            if self._process is not None:
                self._process.terminate()
                self._process.wait()
                self._process = None

    def _start(self) -> None:
        if self._process is not None or self._failed:
            return
        # It ends with this process, however that ends; its own session keeps Ctrl-C from it.
        command = ("caffeinate", "-i", "-w", str(os.getpid()))
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._failed = True
            logger.warning(
                "The Mac may fall asleep while requests run: caffeinate failed to start: %s", error
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
