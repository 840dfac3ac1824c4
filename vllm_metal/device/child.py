# SPDX-License-Identifier: Apache-2.0
"""Runs processes that may hang or die, hears what they say, and says how they ended.

A child's messages are lines of JSON with a mark, among all that it prints.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: Lines of a process's output that are kept for the report: all of a start, and some traces.
KEPT_LINES = 2000
#: Seconds for each stage of a child. A disk may take minutes over a large model, a hub longer.
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "starting": 300.0,
        "loading the model": 1800.0,
        "answering": 300.0,
        "shutting down": 60.0,
        "leaving": 60.0,
    }
)
#: Has the doctor's children send no usage statistics, and log to it.
_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
_POLL = 0.2  # seconds
_MARK = "vllm-metal-doctor: "
_ERROR = re.compile(r"\b(?:\w+\.)*(\w*(?:Error|Exception)\b: \S.*)")  # without its module
_OTHERS_FAULT = "Engine core initialization failed"  # the parent says so after the real error

Progress = Callable[[str], None]


def say(**fields: Any) -> None:
    """Sends the doctor a message; the fields must be JSON. `stage` names what begins now."""
    # Begins a new line: what was printed before may not end with one.
    print(f"\n{_MARK}{json.dumps(fields)}", flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The fields of a line that `say` printed; None for any other."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


class TookTooLong(Exception):
    """A process took longer than its stage allows."""


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it printed."""

    status: int | None  # exit status; -n: ended by signal n; None: it hung, and we ended it
    seconds: float
    lines: tuple[str, ...]  # the last it printed, on stdout and stderr, without messages
    #: Fields of its messages; later ones replace earlier ones.
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def how(self) -> str:
        """The end in words, with the error if there was one.

        Such as ``ended by signal 11 (SIGSEGV) while shutting down``.
        """
        stage = f" while {self.told['stage']}" if "stage" in self.told else ""
        if self.status is None:
            return f"hung{stage} and was ended after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by signal {-self.status} ({_signal_name(-self.status)}){stage}"
        error = f": {self.error}" if self.error else ""
        return f"ended with exit status {self.status}{stage}{error}"

    @property
    def error(self) -> str:
        """The last error it printed, or else its last line; empty if it printed nothing."""
        found = [match[1] for line in self.lines if (match := _ERROR.search(line))]
        causes = [error for error in found if _OTHERS_FAULT not in error]
        return (causes or found or self.lines or ("",))[-1]


class Child:
    """A process and all that it starts; leaving the block ends those that still run."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        request: str | None = None,
        parse: Callable[[str], dict[str, Any] | None] = heard,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """
        Args:
            command: program and arguments.
            environment: variables added to this process's; None leaves a variable out.
            request: what the process finds on stdin; None: nothing.
            parse: finds the message in a line; None: it has none.
            pass_fds: descriptors that the process inherits.
        """
        self._parse = parse
        self._started = time.monotonic()
        self._lines: list[str] = []
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.told: dict[str, Any] = {}
        changed = os.environ | _VARIABLES | dict(environment or {})
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if request is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in changed.items() if value is not None},
            start_new_session=True,  # so that all it starts can be ended as one group
            pass_fds=pass_fds,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError), self.process.stdin as stdin:  # it may be dead already
                stdin.write(request or "")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def message(self, limit: float) -> dict[str, Any] | None:
        """The next message, or None when the process has ended.

        Raises:
            TookTooLong: neither happened within `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            left = self.alive
            if not left:
                self._reader.join(timeout=5)  # the reader may still hold lines
            with suppress(queue.Empty):
                found = self._messages.get(timeout=_POLL if left else 0)
                self.told |= found
                return found
            if not left:
                return None
            if time.monotonic() > deadline:
                raise TookTooLong

    def interrupt(self) -> None:
        """Sends Ctrl-C as a terminal does: to the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, limit: float) -> Ended:
        """Waits for the end; ends the process itself after `limit` seconds."""
        try:
            status: int | None = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        return self.ended(status)

    def ended(self, status: int | None) -> Ended:
        """How the process ended: with `status`, or, if that is None, ended here and now."""
        seconds = time.monotonic() - self._started
        self._end()
        while not self._messages.empty():
            self.told |= self._messages.get()
        return Ended(status, seconds, tuple(self._lines[-KEPT_LINES:]), self.told)

    def _end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses where all are zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (found := self._parse(line)) is not None:
                self._messages.put(found)
            elif text := line.rstrip():
                self._lines.append(text)
                del self._lines[: -2 * KEPT_LINES]


def run(
    command: Sequence[str],
    progress: Progress,
    environment: Mapping[str, str | None] | None = None,
    limits: Mapping[str, float] = LIMITS,
) -> Ended:
    """Runs a process to its end, or until a stage takes too long.

    Args:
        command: to run.
        progress: called with the name of each stage.
        environment: see `Child`.
        limits: seconds by stage; the first limit holds until the first message.
    """
    longest = next(iter(limits.values()))
    with Child(command, environment) as child:
        try:
            while (told := child.message(longest)) is not None:
                if (stage := told.get("stage")) is not None:
                    progress(stage)
                    longest = limits.get(stage, longest)
        except TookTooLong:
            return child.ended(None)
        return child.wait(longest)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module with this interpreter.

    Like the commands that users type, it does not import from the current folder (-P).
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
