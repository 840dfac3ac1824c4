# SPDX-License-Identifier: Apache-2.0
"""The doctor's kernel checks: selection, order and report."""

import itertools
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from cli.doctor.conftest import ignore

from metal_kernels.paged_attention import AttentionShape, unsupported
from metal_kernels.selfcheck import KERNELS, Case, Outcome, contiguous
from tests.metal_kernels.selfchecks import in_use
from vllm_metal.cli.doctor import kernels
from vllm_metal.device import child, record
from vllm_metal.device.record import Record


def test_the_matrix_is_of_kernels_that_exist():
    cases = kernels.all_cases()
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert unsupported(case.shape, case.dtype, case.block_size) is None, case
    for cases in (kernels.all_cases(), kernels.quick_cases()):
        assert {name for case in cases for name in in_use(case)} == set(KERNELS)
    sizes = {(case.shape.head_size, case.dtype, case.cache_dtype) for case in kernels.all_cases()}
    assert len(sizes) == 8 * 3 * 3


def test_the_quickest_come_first():
    elements = [case.shape.num_heads * case.shape.head_size for case in kernels.all_cases()]
    assert elements == sorted(elements)


def test_failures_are_named_and_shown_beside_what_works():
    one, two, _ = kernels.quick_cases()
    outcomes = [
        Outcome("kv_write", one, ok=True, largest_error=0.5, tolerance=1.0),
        Outcome("decode", one, ok=True, largest_error=0.1, tolerance=1.0, rows=4),
        Outcome("decode", one, ok=False, detail="error: planted", rows=8),
        Outcome("kv_write", two, ok=True, largest_error=0.0, tolerance=0.0),
    ]
    found = kernels.finding(outcomes, on_metal=True)
    assert found.status == "failed" and "decode of 8 rows failed, in 2 kinds" in found.seen
    assert "VLLM_METAL_KERNELS=mlx" in found.advice
    row = kernels.row(one, outcomes[:3])
    assert "ok 0.50" in row and "FAILED" in row and "ok 0.10" not in row
    assert any("error: planted" in line for line in kernels.legend(outcomes))
    assert kernels.finding(outcomes[:2], on_metal=True).status == "ok"


def test_a_run_goes_on_where_the_budget_ended_the_one_before(tmp_path, script):
    command = script(
        "import json, sys\n"
        "request = json.load(sys.stdin)\n"
        "done = [(one['case'], one['kernel']) for one in request['done']]\n"
        "for case in request['cases']:\n"
        "    if (case, 'kv_write') not in done:\n"
        "        print(json.dumps({'kernel': 'kv_write', 'case': case, 'ok': False}), flush=True)\n"
    )
    runner = kernels.Runner("by a double", command, 60.0)
    wanted, kept = kernels.quick_cases(), Record(tmp_path / "record")

    def looked(seconds):
        ticks = itertools.count()
        budget = (ignore, kept, seconds, lambda: float(next(ticks)))
        return list(kernels.check(wanted, runner, *budget))

    first = looked(1.0)  # two ticks after the start
    assert [outcome.case for outcome in first] == wanted[:2]
    left = kernels.pending_checks(wanted, first)
    assert left is not None and left.status == "warning"
    assert left.seen.startswith("1 of 3 kinds") and "goes on" in left.advice
    second = looked(0.0)
    assert [outcome.case for outcome in second] == wanted
    assert kernels.pending_checks(wanted, second) is None
    assert [outcome.case for outcome in looked(0.0)] == wanted  # known already


def test_by_default_what_was_served_is_checked_and_all_else_if_asked(monkeypatch):
    served = replace(kernels.quick_cases()[0], window=77)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(record, "served", lambda: [served])
    quick = kernels.quick_cases()
    assert kernels.wanted_cases(quick=True) == quick
    *same, timed, last = kernels.wanted_cases(quick=False)
    assert (same, last) == (quick, served) and "decode_way" in timed.kernels
    every = kernels.wanted_cases(quick=False, every=True)
    assert every[:5] == [*quick, timed, served] and set(kernels.all_cases()) <= set(every)


#: Copies and MLX's attention go by this many bytes a second.
GPU = 1e11


def timed(case, speed):
    """Makes a self-check outcome for our kernels at this share of `GPU`."""
    shape = case.shape
    row = 2 * shape.num_kv_heads * shape.head_size * case.cache_dtype.size
    times = {way: {} for way in ("metal", "mlx", contiguous.BACKEND)}
    for requests, context in ((8, 1024), (1, 8192)):
        by_gpu = requests * context * row / GPU
        for way, seconds in zip(times, (by_gpu / speed, 3 * by_gpu, by_gpu), strict=True):
            times[way][f"{requests} x 1 of {context}"] = seconds
    shares = contiguous.decode_shares(case, times, GPU)
    return Outcome("decode_way", case, ok=True, times=times, shares=shares)


@pytest.mark.parametrize(("speed", "status"), [(1.0, "ok"), (0.9, "ok"), (0.8, "warning")])
def test_a_slow_decode_kernel_is_warned_of_though_it_beats_gathering(speed, status):
    case = Case(AttentionShape(32, 8, 128, 128), mx.bfloat16, mx.bfloat16, 16)
    outcome = timed(case, speed)
    assert outcome.fastest == "metal" and set(outcome.times) == {"metal", "mlx"}
    found = kernels.decode_speed([outcome])
    assert found.status == status
    assert f"8 x 1 of 1024 ({case}): {speed:.2f} of a copy's speed, {speed:.2f} of" in found.seen
    assert bool(found.advice) == (status == "warning")
    small = replace(case, shape=AttentionShape(14, 2, 64, 64))
    assert kernels.decode_speed([timed(small, speed)]).status == "ok"
    assert kernels.decode_speed([Outcome("decode", case, ok=True)]) is None


def test_times_of_both_ways_are_shown():
    case = kernels.quick_cases()[0]
    times = {"metal": {"1 x 512 of 4096": 3e-3}, "mlx": {"1 x 512 of 4096": 1e-3}}
    timed = Outcome("prefill_way", case, ok=True, times=times)
    text = "\n".join(kernels.legend([timed]))
    assert "prefill_way: mlx" in text and "metal 3000 µs, mlx 1000 µs" in text


def test_a_kernel_that_ends_its_process_costs_its_own_time_only(script):
    command = script(
        "import os, sys\n"
        "start = int(sys.argv[-1])\n"
        "if not start: send_message(bandwidth=1e11)\n"
        "for index, name in list(enumerate(['write', 'decode', 'gather', 'copy']))[start:]:\n"
        "    send_message(index=index, timing=name)\n"
        "    if name == 'decode': os.abort()\n"
        "    if name == 'gather':\n"
        "        send_message(index=index, name=name, failed='error: planted')\n"
        "        continue\n"
        "    send_message(index=index, name=name, seconds=1e-3, moved=10**7)\n"
    )
    found = kernels.time_all(ignore, command)
    assert [reported.get("name") for reported in found] == [
        None,
        "write",
        "decode",
        "gather",
        "copy",
    ]
    assert "SIGABRT" in found[2]["failed"]
    table = list(kernels.times_table(found))
    assert "100 GB/s" in table[0]
    assert any(line.startswith("copy") and "10.0" in line and "10%" in line for line in table)
    assert any(line.startswith("gather") and "planted" in line for line in table)


def test_a_timing_process_that_never_starts_is_not_started_for_ever(script):
    found = kernels.time_all(ignore, script("raise ImportError('no MLX')"))
    assert len(found) == 1 and "ImportError: no MLX" in found[0]["failed"]


def test_the_timing_process_times_every_kernel():
    command = [*(sys.executable, "-m", "vllm_metal.cli.doctor.children.timing")]
    result = subprocess.run(
        [*command, "--interpret", "--contexts", "32", "64", "--start", "16"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    reported = [
        found for line in result.stdout.splitlines() if (found := child.parse_message(line))
    ]
    timed = [found["name"] for found in reported if "seconds" in found]
    assert len(timed) == 2 and all("uint8 cache" in name for name in timed)
    assert all(found["seconds"] > 0 for found in reported if "seconds" in found)
