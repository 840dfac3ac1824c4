# SPDX-License-Identifier: Apache-2.0
"""Runs processes that may hang or crash, reads their messages, and reports how they ended.

Messages are marked lines of JSON among everything else that a child prints.
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

#: Lines of output kept for the report: enough for all of a start, and some tracebacks.
KEPT_LINES = 2000
#: Time limits in seconds per stage of a child. Reading a large model may take minutes, a download
#: longer.
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "starting": 300.0,
        "loading the model": 1800.0,
        "answering": 300.0,
        "shutting down": 60.0,
        "leaving": 60.0,
    }
)
#: Disables usage statistics in the doctor's children, and makes them log.
_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "INFO"}
_POLL = 0.2  # seconds
_MARK = "vllm-metal-doctor: "
_ERROR = re.compile(r"\b(?:\w+\.)*(\w*(?:Error|Exception)\b: \S.*)")  # without its module
#: The engine's parent process prints this after the real error.
_OTHERS_FAULT = "Engine core initialization failed"

Progress = Callable[[str], None]


def send_message(**fields: Any) -> None:
    """Sends the parent a message of JSON fields; `stage` names the activity that starts now."""
    # Starts a new line: earlier output may not end with one.
    print(f"\n{_MARK}{json.dumps(fields)}", flush=True)


def parse_message(line: str) -> dict[str, Any] | None:
    """Parses a line that `send_message` printed; None for any other line."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


class StageTimeout(Exception):
    """A process took longer than its stage allows."""


@dataclass(frozen=True)
class ChildResult:
    """A process's end and its output."""

    status: int | None  # exit status; -n: ended by signal n; None: it hung and was killed
    seconds: float
    lines: tuple[str, ...]  # last lines of stdout and stderr, without messages
    #: Merged fields of its messages; later ones replace earlier ones.
    reported: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def exit_reason(self) -> str:
        """Description of the end, such as ``ended by signal 11 (SIGSEGV) while shutting down``."""
        stage = f" while {self.reported['stage']}" if "stage" in self.reported else ""
        if self.status is None:
            return f"hung{stage} and was ended after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by signal {-self.status} ({_signal_name(-self.status)}){stage}"
        error = f": {self.error}" if self.error else ""
        return f"ended with exit status {self.status}{stage}{error}"

    @property
    def error(self) -> str:
        """The last error that the process printed, else its last line; empty without output."""
        found = [match[1] for line in self.lines if (match := _ERROR.search(line))]
        causes = [error for error in found if _OTHERS_FAULT not in error]
        return (causes or found or self.lines or ("",))[-1]


class Child:
    """A process in its own group; leaving the `with` block kills what still runs of the group."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        request: str | None = None,
        parse: Callable[[str], dict[str, Any] | None] = parse_message,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts the process.

        Args:
            command: program and arguments.
            environment: variables added to this process's; None removes a variable.
            request: text for the process's stdin.
            parse: extracts the message from an output line; returns None if there is none.
            pass_fds: file descriptors that the process inherits.
        """
        self._parse = parse
        self._started = time.monotonic()
        self._lines: list[str] = []
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.reported: dict[str, Any] = {}
        changed = os.environ | _VARIABLES | dict(environment or {})
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if request is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: value for name, value in changed.items() if value is not None},
            start_new_session=True,  # so that it can be killed together with its children
            pass_fds=pass_fds,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError), self.process.stdin as stdin:  # it may have died already
                stdin.write(request or "")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def message(self, limit: float) -> dict[str, Any] | None:
        """Returns the next message, or None once the process has ended.

        Raises StageTimeout if neither happens within `limit` seconds.
        """
        deadline = time.monotonic() + limit
        while True:
            is_alive = self.alive
            if not is_alive:
                self._reader.join(timeout=5)  # the reader may not have delivered all lines yet
            with suppress(queue.Empty):
                message = self._messages.get(timeout=_POLL if is_alive else 0)
                self.reported |= message
                return message
            if not is_alive:
                return None
            if time.monotonic() > deadline:
                raise StageTimeout

    def interrupt(self) -> None:
        """Sends Ctrl-C like a terminal, to the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, limit: float) -> ChildResult:
        """Waits for the end; kills the process after `limit` seconds."""
        try:
            status: int | None = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        return self.ended(status)

    def ended(self, status: int | None) -> ChildResult:
        """Describes how the process ended: with `status`, or killed by this call if None."""
        seconds = time.monotonic() - self._started
        self._end()
        while not self._messages.empty():
            self.reported |= self._messages.get()
        return ChildResult(status, seconds, tuple(self._lines[-KEPT_LINES:]), self.reported)

    def _end(self) -> None:
        # macOS raises PermissionError if only zombies are left in the group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=5)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (message := self._parse(line)) is not None:
                self._messages.put(message)
            elif text := line.rstrip():
                self._lines.append(text)
                del self._lines[: -2 * KEPT_LINES]  # bounds memory; `ended` keeps half of these


def run(
    command: Sequence[str],
    progress: Progress,
    environment: Mapping[str, str | None] | None = None,
    limits: Mapping[str, float] = LIMITS,
) -> ChildResult:
    """Runs a process to its end, or until a stage takes too long.

    `progress` is called with the name of each stage. `limits` maps stages to seconds; the first
    limit applies until the first message.
    """
    limit = next(iter(limits.values()))
    with Child(command, environment) as child:
        try:
            while (message := child.message(limit)) is not None:
                if (stage := message.get("stage")) is not None:
                    progress(stage)
                    limit = limits.get(stage, limit)
        except StageTimeout:
            return child.ended(None)
        return child.wait(limit)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module with this interpreter."""
    # -P: no imports from the current folder, like the commands that users type.
    return (sys.executable, "-P", "-m", module, *arguments)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
