# SPDX-License-Identifier: Apache-2.0
"""Has our kernels checked on this machine, in a process of its own, and remembers what came out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import metal_kernels
from metal_kernels.selfcheck import Case, Check, Outcome, checks, next_check
from vllm_metal.device.child import Child, Ended, TookTooLong
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
    tell: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Which kernels of the cases work, checked once for each machine and version of the kernels.

    A kernel without an outcome could not be checked, and must not be used.

    Args:
        wanted: what to check, for a server.
        command: of the checking process; it reads cases and prints as metal_kernels.selfcheck does.
        time_limit: seconds for each check.
        folder: where results are kept; None: in the user's cache folder.
        tell: is given a line for each check that begins.
    """
    record = Record(folder)
    record.add_served(wanted)
    known = record.outcomes(wanted)
    return [*known, *outcomes(wanted, command, time_limit, record, tell)]


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
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Outcome]:
    """Checks the cases in a child process, and in further ones what is left after a hang or crash.

    A check that hangs or kills its process has failed. If a process fails before its first check,
    the first kernel has failed, and no other process is started; that is not recorded, as it may
    say nothing of the kernel.

    Args:
        wanted, command, time_limit: see `results`.
        record: has what need not be checked again, and is given each outcome; None: check all.
        tell: see `results`.
    """
    found = [] if record is None else record.outcomes(wanted)
    for _ in range(_PROCESSES):
        if all(next_check(case, found) is None for case in wanted):
            return
        began, running, end = False, (wanted[0], checks(wanted[0])[0]), ""
        with _started(wanted, found, command) as child:
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
                end = f"ended its process with {_how(ended)}"
            except TookTooLong:
                ended, end = child.ended(None), f"did not end within {time_limit:g} s"
        (case, check), log = running, "\n".join(ended.lines[-_SAID_LINES:])
        stopped = Outcome(check.kernel, case, False, end, rows=check.rows, wide=check.wide, log=log)
        found.append(stopped)
        if record is not None and began:
            record.add_outcome(stopped)
        yield stopped
        if not began:
            return


def _left(wanted: Sequence[Case], found: Sequence[Outcome]) -> int:
    """Checks without an outcome; some of them may need none."""
    done = {(outcome.case, outcome.check) for outcome in found}
    return sum((case, check) not in done for case in wanted for check in checks(case))


def _started(wanted: Sequence[Case], done: Sequence[Outcome], command: Sequence[str]) -> Child:
    """A checking process."""
    request = {
        "cases": [case.to_json() for case in wanted],
        "done": [outcome.to_json() for outcome in done],
    }
    return Child(command, {"PYTHONPATH": _python_path()}, json.dumps(request), _parsed)


def _how(ended: Ended) -> str:
    assert ended.status is not None
    status = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
    return f"{status}: {ended.lines[-1].strip() if ended.lines else ''}"


def _python_path() -> str:
    """PYTHONPATH with which a child imports the metal_kernels of this process."""
    inherited = os.environ.get("PYTHONPATH")
    root = str(_KERNELS_FOLDER.parent)
    return f"{root}{os.pathsep}{inherited}" if inherited else root


def _parsed(line: str) -> dict[str, Any] | None:
    """A message of the checking process; None for a line that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "case" in message else None
