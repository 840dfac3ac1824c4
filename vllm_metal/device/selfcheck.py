# SPDX-License-Identifier: Apache-2.0
"""Runs the self-check of our kernels on this machine in a child process, and records results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import metal_kernels
from metal_kernels.selfcheck import Case, Check, Outcome, checks, next_check
from vllm_metal.device.child import Child, ChildResult, StageTimeout
from vllm_metal.device.record import Record

COMMAND = (sys.executable, "-m", "metal_kernels.selfcheck")
#: Time limit of one check in seconds. A check compiles a few variants, each in well under a second,
#: and runs even shorter; only a hang takes this long.
TIME_LIMIT = 60.0
#: Processes that checks may hang or crash before the remaining checks are skipped.
_PROCESSES = 4
_LOG_LINES = 200  # kept of a process that dies, for reports
_KERNELS_FOLDER = Path(metal_kernels.__file__).parent


def results(
    wanted: Sequence[Case],
    command: Sequence[str] = COMMAND,
    time_limit: float = TIME_LIMIT,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Checks which kernels of the cases work, once per machine and version of the kernels.

    A kernel without an outcome could not be checked, and must not be used.

    Args:
        wanted: the cases of a server.
        command: starts the checking process, which reads and prints what metal_kernels.selfcheck
            does.
        time_limit: seconds per check.
        folder: where results are stored; None for the user's cache.
        tell: receives a line for each check that starts.
    """
    record = Record(folder)
    record.add_served(wanted)
    known = record.outcomes(wanted)
    return [*known, *outcomes(wanted, command, time_limit, record, tell)]


def describe_failures(found: Sequence[Outcome]) -> list[str]:
    """Describes failures, one line per error: the kernels, the first case, and the error."""
    failed: dict[Check, Outcome] = {}
    for outcome in found:
        if not outcome.ok:
            failed.setdefault(outcome.check, outcome)
    reasons: dict[str, list[Outcome]] = {}  # one error may fail several kernels
    for outcome in failed.values():
        reasons.setdefault(outcome.detail, []).append(outcome)
    return [
        f"{', '.join(str(outcome.check) for outcome in group)} ({group[0].case}): {detail}"
        for detail, group in reasons.items()
    ]


def outcomes(
    wanted: Sequence[Case],
    command: Sequence[str] = COMMAND,
    time_limit: float = TIME_LIMIT,
    record: Record | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Outcome]:
    """Checks the cases in a child process; continues in further ones after a hang or crash.

    A check that hangs or kills its process has failed. If a process fails before its first check,
    the first kernel is reported as failed, and no other process is started.

    Args:
        record: skips checks that it has outcomes of, and stores new ones; None checks all.
    """
    found = [] if record is None else record.outcomes(wanted)
    for _ in range(_PROCESSES):
        if all(next_check(case, found) is None for case in wanted):
            return
        began, running, end = False, (wanted[0], checks(wanted[0])[0]), ""
        with _start_child(wanted, found, command) as child:
            try:
                while (message := child.message(time_limit)) is not None:
                    if "running" in message:
                        check = Check(
                            message["running"], message.get("rows"), message.get("wide", False)
                        )
                        began, running = True, (wanted[message["case"]], check)
                        tell(f"checking the kernel {check}, {_left(wanted, found) - 1} more to go")
                        continue
                    found.append(Outcome.from_json(message))
                    if record is not None:
                        record.add_outcome(found[-1])
                    yield found[-1]
                ended = child.wait(time_limit)
                if ended.ok:
                    return
                end = f"ended its process with {_describe_end(ended)}"
            except StageTimeout:
                ended, end = child.ended(None), f"did not end within {time_limit:g} s"
        (case, check), log = running, "\n".join(ended.lines[-_LOG_LINES:])
        stopped = Outcome(check.kernel, case, False, end, rows=check.rows, wide=check.wide, log=log)
        found.append(stopped)
        # A failure before the first check may have nothing to do with the kernel.
        if record is not None and began:
            record.add_outcome(stopped)
        yield stopped
        if not began:
            return


def _left(wanted: Sequence[Case], found: Sequence[Outcome]) -> int:
    # An upper bound: some of these checks may turn out to be unnecessary.
    done = {(outcome.case, outcome.check) for outcome in found}
    return sum((case, check) not in done for case in wanted for check in checks(case))


def _start_child(wanted: Sequence[Case], done: Sequence[Outcome], command: Sequence[str]) -> Child:
    request = {
        "cases": [case.to_json() for case in wanted],
        "done": [outcome.to_json() for outcome in done],
    }
    return Child(command, {"PYTHONPATH": _python_path()}, json.dumps(request), _parse)


def _describe_end(ended: ChildResult) -> str:
    assert ended.status is not None
    status = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
    return f"{status}: {ended.lines[-1].strip() if ended.lines else ''}"


def _python_path() -> str:
    # Makes the child import the metal_kernels of this process.
    inherited = os.environ.get("PYTHONPATH")
    root = str(_KERNELS_FOLDER.parent)
    return f"{root}{os.pathsep}{inherited}" if inherited else root


def _parse(line: str) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "case" in message else None
