# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a starting server, read from its output."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_LOG = re.compile(r"^vllm-metal: starting; the log is (.+)$", re.MULTILINE)
#: A tqdm bar in bytes: name, bytes done, total, remaining time.
_BAR = re.compile(
    r"(?P<name>[^\r\n]*?):? +\d+%\|[^|\r\n]*\| *(?P<done>[\d.]+[kMGT]?B?)/(?P<total>[\d.]+[kMGT]B?)"
    r" \[[\d:]+<(?P<left>[\d:]+|\?)"
)
_LOADS = "Loading weights"  # name of our own bar
_READ = 4096  # bytes at the end of the output, enough for the latest bars
_STEP_S = 30  # seconds between lines that are not overwritten


class StartProgress:
    """Shows a server's start in one line; without a terminal, in a line every half minute."""

    def __init__(
        self, output: Path, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output, self._stream, self._clock = output, stream, clock
        self._began, self._step, self._shown, self._log = clock(), -1, "", ""

    def show(self) -> None:
        """Shows the server's current activity; the first call also names its log."""
        self._name_log()
        seconds = int(self._clock() - self._began)
        step = seconds // _STEP_S
        line = f"vllm-metal: {self._activity()} ({seconds} s)"
        if self._stream.isatty() and line != self._shown:
            self._write(f"\r\x1b[K{line}")
        elif not self._stream.isatty() and step != self._step:
            self._write(f"{line}\n")
        self._shown, self._step = line, step

    def ended(self) -> None:
        """Clears the line, and names the log if it has not been shown."""
        self._clear()
        self._name_log()

    def _name_log(self) -> None:
        with self._output.open("rb") as file:
            text = file.read(_READ).decode(errors="replace")
        if not self._log and (found := _LOG.search(text)):
            self._log = found[1]
            self._clear()
            self._write(f"vllm-metal: the server's log is {self._log}\n")

    def _clear(self) -> None:
        if self._stream.isatty():
            self._write("\r\x1b[K")

    def ready(self) -> None:
        """Reports that the server answers."""
        self._clear()
        self._write(f"vllm-metal: ready after {int(self._clock() - self._began)} s\n")

    def _activity(self) -> str:
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - _READ))
            bars = list(_BAR.finditer(file.read().decode(errors="replace")))
        if not bars:
            return "the server starts"
        name, done, total, left = bars[-1].group("name", "done", "total", "left")
        if done.rstrip("B") == total.rstrip("B"):
            return "the server starts"
        amount = f"{done.rstrip('B')}B of {total.rstrip('B')}B"
        if _LOADS in name:
            return f"the server loads the weights, {amount}"
        return f"the server downloads {name.strip()}, {amount}, {left} left"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
