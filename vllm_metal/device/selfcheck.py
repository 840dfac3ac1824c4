# SPDX-License-Identifier: Apache-2.0
"""Has our kernels checked on this machine, in a process of its own, and remembers what came out."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import metal_kernels
from metal_kernels.selfcheck import Case, Check, Outcome, checks, next_check
from vllm_metal.device.record import Record

COMMAND = (sys.executable, "-m", "metal_kernels.selfcheck")
#: Seconds for one check. It compiles a few variants, of well under a second each, and then runs for
#: less; only a hang takes this long.
TIME_LIMIT = 60.0
#: Processes that one check after the other may hang or kill before the rest is given up.
_PROCESSES = 4
_SAID_LINES = 200  # of a process that dies, for reports
_KERNELS_FOLDER = Path(metal_kernels.__file__).parent


def results(
    wanted: Sequence[Case],
    command: Sequence[str] = COMMAND,
    time_limit: float = TIME_LIMIT,
    folder: Path | None = None,
) -> list[Outcome]:
    """Which kernels of the cases work, checked once for each machine and version of the kernels.

    A kernel without an outcome could not be checked, and must not be used.

    Args:
        wanted: what to check, for a server.
        command: of the checking process; it reads cases and prints as metal_kernels.selfcheck does.
        time_limit: seconds for each check.
        folder: where results are kept; None: in the user's cache folder.
    """
    record = Record(folder)
    record.add_served(wanted)
    known = record.outcomes(wanted)
    return [*known, *outcomes(wanted, command, time_limit, record)]


def describe_failures(found: Sequence[Outcome]) -> list[str]:
    """A line for each way in which kernels fail: the kernels, the first such case, the error."""
    failed: dict[Check, Outcome] = {}
    for outcome in found:
        if not outcome.ok:
            failed.setdefault(outcome.check, outcome)
    reasons: dict[str, list[Outcome]] = {}  # one error may fail several kernels
    for outcome in failed.values():
        reasons.setdefault(outcome.detail, []).append(outcome)
    return [
        f"{', '.join(str(outcome.check) for outcome in alike)} ({alike[0].case}): {detail}"
        for detail, alike in reasons.items()
    ]


def outcomes(
    wanted: Sequence[Case],
    command: Sequence[str] = COMMAND,
    time_limit: float = TIME_LIMIT,
    record: Record | None = None,
) -> Iterator[Outcome]:
    """Checks the cases in a child process, and in further ones what is left after a hang or crash.

    A check that hangs or kills its process has failed. If a process fails before its first check,
    the first kernel has failed, and no other process is started; that is not recorded, as it may
    say nothing of the kernel.

    Args:
        wanted, command, time_limit: see `results`.
        record: has what need not be checked again, and is given each outcome; None: check all.
    """
    found = [] if record is None else record.outcomes(wanted)
    for _ in range(_PROCESSES):
        if all(next_check(case, found) is None for case in wanted):
            return
        child = _Child(wanted, found, command)
        for outcome in child.outcomes(time_limit):
            found.append(outcome)
            if record is not None:
                record.add_outcome(outcome)
            yield outcome
        if child.blamed is None:
            return
        case, check = child.blamed
        log = "\n".join(child.said)
        stopped = Outcome(check.kernel, case, False, child.end, rows=check.rows, log=log)
        found.append(stopped)
        if record is not None and child.began:
            record.add_outcome(stopped)
        yield stopped
        if not child.began:
            return


class _Child:
    """A checking process.

    Attributes:
        began: whether it started a check.
        blamed: the case and check it was running when it hung or died; None: it ended well.
        end: how it hung or died, in words.
        said: the last lines it printed besides outcomes.
    """

    def __init__(
        self, wanted: Sequence[Case], done: Sequence[Outcome], command: Sequence[str]
    ) -> None:
        self._wanted = wanted
        self._running = (wanted[0], checks(wanted[0])[0])
        self.began = False
        self.blamed: tuple[Case, Check] | None = None
        self.end = ""
        self.said: deque[str] = deque(maxlen=_SAID_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": _python_path()},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._lines: queue.Queue[str | None] = queue.Queue()
        pump = threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True)
        pump.start()
        request = {
            "cases": [case.to_json() for case in wanted],
            "done": [outcome.to_json() for outcome in done],
        }
        _send(self._process.stdin, json.dumps(request))

    def outcomes(self, time_limit: float) -> Iterator[Outcome]:
        """Outcomes as they come, each within `time_limit` seconds; then the process is ended."""
        try:
            while (line := self._lines.get(timeout=time_limit)) is not None:
                message = _parsed(line)
                if message is None:
                    self.said.extend(filter(None, [line.rstrip()]))
                elif "running" in message:
                    case, check = self._wanted[message["case"]], message["running"]
                    self._running, self.began = (case, Check(check, message.get("rows"))), True
                else:
                    yield Outcome.from_json(message)
            if status := self._process.wait():
                ended = f"signal {-status}" if status < 0 else f"status {status}"
                last = self.said[-1].strip() if self.said else ""
                self.blamed, self.end = self._running, f"ended its process with {ended}: {last}"
        except queue.Empty:
            self.blamed, self.end = self._running, f"did not end within {time_limit:g} s"
        finally:
            self._process.kill()
            self._process.wait()


def _python_path() -> str:
    """PYTHONPATH with which a child imports the metal_kernels of this process."""
    inherited = os.environ.get("PYTHONPATH")
    root = str(_KERNELS_FOLDER.parent)
    return f"{root}{os.pathsep}{inherited}" if inherited else root


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _send(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.close()
    except BrokenPipeError:
        pass  # the child has died already; its exit status says so


def _parsed(line: str) -> dict[str, Any] | None:
    """A message of the checking process; None for a line that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "case" in message else None
