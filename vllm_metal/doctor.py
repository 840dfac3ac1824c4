# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor`: every kernel on this machine, and a report to attach to a bug report."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import (
    KERNELS,
    Case,
    Outcome,
    Timing,
    copy_bandwidth,
    dtype_name,
    timings,
)
from vllm_metal import device, envs, selfcheck
from vllm_metal.vllm_patches import releases

_PACKAGES = ("vllm-metal", "mlx", "mlx-metal", "mlx-lm", "transformers", "torch", "numpy")
_GIB = 2**30
_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
_CODES = (mx.uint8, mx.int8)
# Head sizes and query heads to a K/V head. Each of a group's powers of two is a kernel of its own;
# models of each size have: 64: Qwen2-0.5B 7, 128: Llama 3 4, 256: Gemma 2 2, 512: Gemma 4 8.
_GROUPS = {64: 7, 80: 1, 96: 1, 128: 4, 192: 8, 256: 2, 512: 8}
_LATENT = AttentionShape(num_heads=16, num_kv_heads=1, head_size=576, value_size=512)
_INTERPRETED_STEPS = 8  # of a shape, each kernel in every size; the device's usual number elsewhere


@dataclass(frozen=True)
class Runner:
    """Who runs the kernels."""

    how: str  # for people
    command: tuple[str, ...]
    time_limit: float  # seconds for each kernel


def run(report: Path, quick: bool) -> int:
    """Checks, times and prints; writes the report as it goes. Returns the exit status.

    Args:
        report: JSON file to write.
        quick: a few shapes for all.
    """
    findings = machine()
    _print_machine(findings)
    runner = _runner()
    if runner is None:
        findings["kernels"] = "not run: no Metal device, and no interpreter"
        print(
            "\nThis machine has no Metal device, so that no kernel can run. To run them in the "
            "interpreter:\n    pip install 'vllm-metal[interpreter]'"
        )
        _write(report, findings)
        return 0
    print(f"\nKernels, {runner.how}:\n")
    on_metal = mx.metal.is_available()
    wanted = quick_cases() if quick or not on_metal else all_cases()
    if on_metal:
        wanted = list(dict.fromkeys([*wanted, *selfcheck.remembered()]))
    outcomes = list(_with_progress(_checked(wanted, runner), len(wanted)))
    findings |= {"how": runner.how, "kernels": [outcome.to_json() for outcome in outcomes]}
    _print_outcomes(outcomes)
    _write(report, findings)  # now, for what comes next runs in this process
    failed = sorted({outcome.kernel for outcome in outcomes if not outcome.ok})
    if on_metal:
        selfcheck.forget()
        measured = _measure(failed)
        findings["timings"] = [dataclasses.asdict(timing) for timing in measured]
        _write(report, findings)
    if failed:
        print(f"\nFailed: {', '.join(failed)}. Please attach {report} to a bug report.")
        return 1
    print(f"\nAll kernels agree with the references. Report: {report}")
    return 0


def machine() -> dict[str, Any]:
    """Versions, memory and settings; nothing that tells who the user is."""
    kind: envs.Device = "metal" if mx.metal.is_available() else "cpu"
    device.select(kind)
    memory = device.memory(kind)
    versions = {name: _version(name) for name in _PACKAGES} | {"vllm": releases.installed_vllm()}
    info = mx.device_info()
    return {
        "versions": {name: found for name, found in versions.items() if found},
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": kind,
        "chip": str(info.get("device_name", platform.machine())),
        "architecture": str(info.get("architecture", platform.machine())),
        "ram_bytes": device.total_memory("cpu"),
        "memory_bytes": dataclasses.asdict(memory),
        "environment": dict(_settings()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _settings() -> Iterator[tuple[str, str]]:
    """The variables that are set; of those that name folders, only that they are."""
    for name, value in sorted(os.environ.items()):
        if name in envs.NAMES or name.startswith(("MLX_", "MTL_", "METAL_")):
            yield name, "set" if "/" in value or "~" in value else value


# ---- what is checked


def all_cases() -> list[Case]:
    """All dtypes, head sizes, block sizes and caches."""
    shapes = [_shape(size) for size in _GROUPS] + [_LATENT]
    kinds = [
        (shape, dtype, cache, block_size)
        for dtype in _FLOATS
        for cache in (dtype, *_CODES)
        for shape in shapes
        for block_size in (16, 32)
    ]
    # Windows, sinks and soft caps compile to nothing else, so each kind takes its turn at one.
    extras: list[dict[str, Any]] = [{}, {"sinks": True}, {"window": 40}, {"softcap": 30.0}, {}]
    return [Case(*kind, **extras[index % len(extras)]) for index, kind in enumerate(kinds)]


def quick_cases() -> list[Case]:
    """A few of them, so that each kernel runs, and each kind of cache."""
    return [
        Case(_shape(64), mx.float16, mx.float16, 16, sinks=True),
        Case(_shape(128), mx.bfloat16, mx.uint8, 32),
        Case(_shape(80), mx.float32, mx.int8, 16, softcap=30.0, window=300),
    ]


def _shape(head_size: int) -> AttentionShape:
    return AttentionShape(2 * _GROUPS[head_size], 2, head_size, head_size)


def _runner() -> Runner | None:
    """None: nothing here can run them."""
    if mx.metal.is_available():
        return Runner(f"on {device.name('metal')}", selfcheck.COMMAND, selfcheck.TIME_LIMIT)
    if not (os.environ.get("VLLM_METAL_CLANG") or importlib.util.find_spec("ziglang")):
        return None
    steps = ("--interpret", "--steps", str(_INTERPRETED_STEPS))
    how = "interpreted on the CPU as this machine has no Metal device: what they compute, not how "
    return Runner(f"{how}fast", (*selfcheck.COMMAND, *steps), time_limit=300.0)


def _checked(wanted: Sequence[Case], runner: Runner) -> Iterator[Outcome]:
    """All outcomes; where a kernel hangs or kills the process, the next case has a new one."""
    left = list(wanted)
    while left:
        last = None
        for outcome in selfcheck.outcomes(left, runner.command, runner.time_limit):
            last = outcome
            yield outcome
        left = left[left.index(last.case) + 1 :] if last is not None else []


# ---- what is said


def _print_machine(findings: dict[str, Any]) -> None:
    memory = findings["memory_bytes"]
    rows = {
        "chip": f"{findings['chip']} ({findings['architecture']}), MLX on {findings['device']}",
        "system": f"{findings['system']}, Python {findings['python']}",
        "versions": ", ".join(f"{name} {found}" for name, found in findings["versions"].items()),
        "memory": f"{findings['ram_bytes'] / _GIB:.1f} GiB; MLX may use "
        f"{memory['total'] / _GIB:.1f}, {memory['available'] / _GIB:.1f} are free",
        "settings": ", ".join(f"{name}={value}" for name, value in findings["environment"].items()),
    }
    for name, row in rows.items():
        print(f"{name:10}{row or 'none set'}")


def _with_progress(outcomes: Iterable[Outcome], num_cases: int) -> Iterator[Outcome]:
    """Says on a terminal where it is."""
    on_terminal, seen = sys.stderr.isatty(), dict[Case, None]()
    for outcome in outcomes:
        seen[outcome.case] = None
        if on_terminal:
            line = f"{len(seen)}/{num_cases}: {outcome.case}, {outcome.kernel}"
            print(f"\r{line:.78}\033[K", end="", file=sys.stderr, flush=True)
        yield outcome
    if on_terminal:
        print("\r\033[K", end="", file=sys.stderr)


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    by_case: dict[Case, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_case.setdefault(outcome.case, {})[outcome.kernel] = outcome
    columns = "".join(f"{kernel:>10}" for kernel in KERNELS)
    print(f"{'dtype':9} {'cache':9}{'head':>5}{'block':>6} {columns}{'s':>8}")
    for case, row in by_case.items():
        cells = "".join(f"{_cell(row.get(kernel)):>10}" for kernel in KERNELS)
        seconds = sum(outcome.seconds for outcome in row.values())
        print(
            f"{dtype_name(case.dtype):9} {dtype_name(case.cache_dtype):9}"
            f"{case.shape.head_size:>5}{case.block_size:>6} {cells}{seconds:>8.1f}"
        )
    print("\nok: error as a share of what rounding explains; -: not in use, or not reached")
    for outcome in outcomes:
        if not outcome.ok:
            print(f"\n{outcome.kernel} failed: {outcome.case}\n  {outcome.detail}")


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if not outcome.ok:
        return "FAILED"
    if not outcome.tolerance or outcome.largest_error is None:
        return "ok exact"
    return f"ok {outcome.largest_error / outcome.tolerance:.2f}"


def _measure(failed: Sequence[str]) -> list[Timing]:
    """Times what works; kernels that failed could end this process."""
    if failed:
        print("\nNot timed, as not all kernels work.")
        return []
    bandwidth = copy_bandwidth()
    print(f"\nTimes; a copy moves {bandwidth / 1e9:.0f} GB/s here:\n")
    print(f"{'kernel':34}{'µs':>9}{'GB/s of K/V':>13}{'of a copy':>11}")
    measured = []
    for dtype, cache_dtype in ((mx.bfloat16, mx.bfloat16), (mx.bfloat16, mx.uint8)):
        case = Case(AttentionShape(32, 8, 128, 128), dtype, cache_dtype, 16)
        for timing in timings(case):
            measured.append(timing)
            print(
                f"{timing.name:34}{timing.seconds * 1e6:>9.1f}"
                f"{timing.bandwidth / 1e9:>13.1f}{timing.bandwidth / bandwidth:>10.0%}"
            )
    return measured


def _write(report: Path, findings: dict[str, Any]) -> None:
    text = json.dumps(findings, indent=1).replace(str(Path.home()), "~")
    report.write_text(text + "\n")
