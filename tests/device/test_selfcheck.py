# SPDX-License-Identifier: Apache-2.0
"""The self-check in a separate process: survival of crashes, and stored results."""

import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import Case
from vllm_metal.device import record, selfcheck
from vllm_metal.device.record import Record
from vllm_metal.settings.extras import INTERPRETER

CASES = [
    Case(AttentionShape(4, 2, 64, 64), mx.float16, mx.float16, block_size, kernels=("kv_write",))
    for block_size in (16, 32)
]
#: Seconds of a check that hangs: a machine that is busy starts a process within them.
TIME_LIMIT = 5.0
SERVING = ("kv_write", "kv_blocks", "decode", "prefill", "reduce")
START = "import json, os, sys, time\nrequest = json.load(sys.stdin)\n"
RUNNING = 'print(json.dumps({"case": 1, "running": "decode", "rows": 4}), flush=True)\n'
GOOD = (
    "for case in request['cases']:\n"
    '    print(json.dumps({"kernel": "kv_write", "case": case, "ok": True}), flush=True)\n'
)


def child(*lines):
    """Returns the command of a process that runs these lines."""
    return [sys.executable, "-c", "".join([START, *lines])]


def failures(*wanted, **options) -> list[str]:
    """Returns lines about the failing kernels."""
    return selfcheck.describe_failures(selfcheck.results(*wanted, **options))


def test_kernels_are_checked_in_another_process(tmp_path: Path):
    command = [*selfcheck.COMMAND, "--compiler", INTERPRETER, "--steps", "4"]
    assert failures(CASES, command, folder=tmp_path) == []


def test_a_kernel_that_hangs_is_named_and_its_process_ended(tmp_path: Path):
    pid_file = tmp_path / "pid"
    write_pid = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
    command = child(GOOD, RUNNING, write_pid, "time.sleep(600)\n")
    (failure,) = failures(CASES, command, time_limit=TIME_LIMIT, folder=tmp_path)
    assert failure.startswith("decode of 4 rows (4/2 heads of 64, float16, float16 cache in blocks")
    assert f"did not end within {TIME_LIMIT:g} s" in failure
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("end", "said"),
    [("os.abort()\n", "signal 6"), ("sys.exit('no device')\n", "status 1: no device")],
)
def test_a_kernel_that_kills_its_process_is_named(tmp_path: Path, end: str, said: str):
    (failure,) = failures(CASES, child(RUNNING, end), folder=tmp_path)
    assert failure.startswith("decode of 4 rows (")
    assert said in failure


def test_all_that_a_dying_process_printed_is_kept_for_reports():
    printed = "print('note: one', flush=True)\nprint('  note: two', flush=True)\n"
    stopped = next(selfcheck.outcomes(CASES, child(RUNNING, printed, "os.abort()\n")))
    assert not stopped.ok and stopped.detail.endswith("signal 6: note: two")
    assert stopped.log == "note: one\n  note: two"


def test_a_process_that_does_not_start_is_a_failure(tmp_path: Path):
    command = [sys.executable, "-c", "raise SystemExit('no such module')"]
    (failure,) = failures(CASES, command, folder=tmp_path)
    assert "no such module" in failure


def counting(tmp_path: Path, *lines: str):
    """Returns a child command that records each of its runs, and their count."""
    runs = tmp_path / "runs"
    runs.touch()
    note = f"open({str(runs)!r}, 'a').write('x')\n"
    return child(note, *lines), lambda: len(runs.read_text())


ONE_FAILS = (
    GOOD.replace("request['cases']", "request['cases'][:1]"),
    RUNNING.replace("decode", "kv_write").replace("4", "None"),
    "os.abort()\n",
)


@pytest.mark.parametrize("lines", [(GOOD,), ONE_FAILS], ids=["pass", "fail"])
def test_results_are_kept_until_something_changes(tmp_path: Path, lines: tuple[str, ...]):
    command, runs = counting(tmp_path, *lines)
    folder = tmp_path / "results"

    def found(cases: list[Case] = CASES) -> list[str]:
        return failures(cases, command, folder=folder)

    first = found()
    assert (found(), runs()) == (first, 1)
    found(CASES[::-1])
    found(CASES[1:])  # by layer, not by model
    assert runs() == 1
    assert record.served(folder) == CASES
    Record(folder).forget()
    assert record.served(folder) == CASES
    assert (found(), runs()) == (first, 2)


def test_a_folder_that_cannot_be_written_only_means_another_check(tmp_path: Path):
    command, runs = counting(tmp_path, GOOD)
    (tmp_path / "file").touch()
    for _ in range(2):
        assert failures(CASES, command, folder=tmp_path / "file" / "results") == []
    assert runs() == 2


REST = (
    "done = request['done']\n"
    "for check in ['kv_write', 'decode', 'prefill']:\n"
    "    if any(outcome['kernel'] == check for outcome in done): continue\n"
    "    rows = None if check == 'kv_write' else 8\n"
    "    print(json.dumps({'case': 0, 'running': check, 'rows': rows}), flush=True)\n"
    "    if check == 'decode': os.abort()\n"
    "    outcome = {'kernel': check, 'case': request['cases'][0], 'ok': True, 'rows': rows}\n"
    "    print(json.dumps(outcome), flush=True)\n"
)


def test_what_a_crash_left_is_checked_in_another_process(tmp_path: Path):
    shape = AttentionShape(8, 1, 64, 64)  # its tiles: 8 rows to decode, 16, 32 and 64 to prefill
    case = Case(shape, mx.float16, mx.float16, 16, window=100, kernels=SERVING)
    command, runs = counting(tmp_path, REST)
    found = list(selfcheck.outcomes([case], command))
    assert [(str(outcome.check), outcome.ok) for outcome in found] == [
        ("kv_write", True),
        ("decode of 8 rows", False),
        ("prefill of 8 rows", True),
    ]
    assert runs() == 2


def test_processes_that_go_on_dying_are_given_up(tmp_path: Path):
    command, runs = counting(tmp_path, RUNNING, "os.abort()\n")
    found = list(selfcheck.outcomes(CASES, command))
    assert runs() == len(found) == 4
    assert not any(outcome.ok for outcome in found)


def test_an_interrupted_check_goes_on_where_it_stopped(tmp_path: Path):
    command, runs = counting(tmp_path, REST.replace("if check == 'decode': os.abort()", "pass"))
    shape = AttentionShape(8, 1, 64, 64)
    case = Case(shape, mx.float16, mx.float16, 16, window=100, kernels=("kv_write", "decode"))
    kept = Record(tmp_path / "results")
    first = next(selfcheck.outcomes([case], command, record=kept))  # and no more is asked of it
    assert first.kernel == "kv_write" and kept.outcomes([case]) == [first]
    rest = list(selfcheck.outcomes([case], command, record=kept))
    assert [outcome.kernel for outcome in rest] == ["decode", "prefill"]
    assert runs() == 2


def test_a_first_start_tells_each_check_and_what_is_left(tmp_path: Path):
    running = "    print(json.dumps({'case': 0, 'running': 'kv_write'}), flush=True)\n"
    each, outcome = GOOD.splitlines(keepends=True)
    command, _ = counting(tmp_path, each, running, outcome)
    lines: list[str] = []
    for _ in range(2):  # a later start has nothing to tell
        selfcheck.results(CASES, command, folder=tmp_path, tell=lines.append)
    assert lines == [f"checking the kernel kv_write, {left} more to go" for left in (1, 0)]


def test_a_process_that_does_not_start_is_tried_again(tmp_path: Path):
    died = [sys.executable, "-c", "raise SystemExit('no memory')"]
    assert failures(CASES, died, folder=tmp_path)
    assert failures(CASES, child(GOOD), folder=tmp_path) == []
