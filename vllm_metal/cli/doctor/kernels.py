# SPDX-License-Identifier: Apache-2.0
"""Checks every Metal kernel against its reference, times it, and formats both as tables."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels.kv_write import RotationKind
from metal_kernels.op_common import QUANTIZED_DTYPES, VALUE_DTYPES
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.paged_attention.op import SIZES_APART
from metal_kernels.selfcheck import (
    BACKENDS,
    CHOICES,
    KERNELS,
    Case,
    Outcome,
    StateKind,
    dtype_name,
    next_check,
)
from vllm_metal.cli.doctor.report import REPORT_BUG, REPORT_IT, Finding
from vllm_metal.cli.doctor.speed import LEAST_RATIO_LARGE
from vllm_metal.device import mlx_device, record, selfcheck
from vllm_metal.device.child import Child, Progress, StageTimeout, python
from vllm_metal.device.record import Record
from vllm_metal.settings.extras import INTERPRETER

# Maps head size to query heads per K/V head. Each power of two that a group size consists of is a
# separate kernel. Examples: 64: Qwen2-0.5B 7, 128: Llama 3 4, 256: Gemma 2 2, 512: Gemma 4 8.
_GROUPS = {64: 7, 80: 1, 96: 1, 128: 4, 192: 8, 256: 2, 512: 8}
_WITH_BIAS = tuple(name for name in KERNELS if name != "gathered")  # MLX's attention has none
_LATENT = AttentionShape(num_heads=16, num_kv_heads=1, head_size=576, value_size=512)
_INTERPRETED_STEPS = 8  # steps per shape; a Metal device uses the self-check's default
_TIMING_LIMIT = 60.0  # seconds per kernel; calls take milliseconds, so only a hang takes longer
#: Seconds of kernel checks in one run, so that the whole doctor takes three minutes.
BUDGET = 80.0
#: Maximum number of processes, in case each one dies immediately.
_MOST_TIMING_PROCESSES = 6


#: Attention of Llama 3.2 3B, which is timed in comparison with MLX's attention.
_TIMED = Case(
    AttentionShape(24, 8, 128, 128),
    *(mx.bfloat16, mx.bfloat16, 16),
    kernels=("kv_write", "kv_gather", "decode", "reduce", "decode_way"),
)
#: Minimum query elements per token of a layer in a model of 3B or more. Smaller layers have too few
#: heads for a GPU with many cores.
_LARGE = _TIMED.shape.num_heads * _TIMED.shape.head_size


@dataclass(frozen=True)
class Runner:
    """A command that checks kernels, on the GPU or by interpreting them."""

    description: str
    command: tuple[str, ...]
    time_limit: float  # seconds for each kernel


# Those of Qwen3-Next, Mamba and Mamba-2, with fewer heads.
_DELTA_RULE = StateKind((2, 128, 4, 128), delta=True, channels=256)
_SELECTIVE_SCAN = StateKind((1, 16, 256, 1), decays="rates", dtype=mx.bfloat16, channels=256)
_STATE_SPACE = StateKind((1, 128, 4, 64), channels=256)


def all_cases() -> list[Case]:
    """Returns cases of all dtypes, head sizes, block sizes and caches; the fastest first."""
    apart = [AttentionShape(8, 2, *sizes) for sizes in SIZES_APART]
    shapes = [_shape(size) for size in _GROUPS] + apart + [_LATENT]
    kinds = [
        (shape, dtype, cache, block_size)
        for dtype in VALUE_DTYPES
        for cache in (dtype, *QUANTIZED_DTYPES)
        for shape in shapes
        for block_size in (16, 32)
    ]
    # Windows and sinks use the same compiled kernels, and a soft cap or bias only changes scores,
    # so each kind gets only one of them.
    extras: list[dict[str, Any]] = [
        {},
        {"sinks": True},
        {"window": 40},
        {"softcap": 30.0},
        {"extent": 48, "kernels": _WITH_BIAS},
        {"states": _DELTA_RULE},
    ]
    cases = [
        Case(*kind, **extras[index % len(extras)], rotation=_rotation(kind[0], index % 3))
        for index, kind in enumerate(kinds)
    ]
    return sorted(cases, key=_cost)


def _rotation(shape: AttentionShape, number: int) -> RotationKind:
    if shape.latent:  # only the part that all heads share is rotated
        return RotationKind(shape.head_size - shape.value_size, shape.value_size, traditional=True)
    # Three kinds that reach all branches of the kernel.
    whole = RotationKind(shape.head_size)
    others = (
        whole._replace(dims=shape.head_size // 2),
        whole._replace(traditional=True, listed=True),
    )
    return (whole, *others)[number]


def _cost(case: Case) -> int:
    # Proportional to the time of a check, including compilation.
    return case.shape.num_heads * (case.shape.head_size + case.shape.value_size)


def quick_cases() -> list[Case]:
    """Returns a few cases that cover each kernel and each kind of cache."""
    first = _shape(64), mx.float16, mx.float16, 16
    second = _shape(128), mx.bfloat16, mx.uint8, 32
    third = _shape(80), mx.float32, mx.int8, 16
    return [
        Case(*first, sinks=True, states=_DELTA_RULE, rotation=RotationKind(64)),
        Case(*second, states=_SELECTIVE_SCAN, rotation=RotationKind(64, traditional=True)),
        Case(*third, softcap=30.0, window=300, states=_STATE_SPACE),
    ]


def _shape(head_size: int) -> AttentionShape:
    return AttentionShape(2 * _GROUPS[head_size], 2, head_size, head_size)


def wanted_cases(quick: bool, every: bool = False) -> list[Case]:
    """Returns the cases for this machine: quick ones, served ones and, if `every`, all others."""
    if not mx.metal.is_available() or quick:
        return quick_cases()
    # The quick cases come first, so that a broken kernel shows immediately.
    others = all_cases() if every else []
    return list(dict.fromkeys([*quick_cases(), _TIMED, *record.served(), *others]))


def find_runner() -> Runner | None:
    """Returns the command that can run the kernels on this machine, or None."""
    if mx.metal.is_available():
        return Runner(f"on {mlx_device.name('metal')}", selfcheck.COMMAND, selfcheck.TIME_LIMIT)
    clang = os.environ.get("VLLM_METAL_CLANG") or importlib.util.find_spec("ziglang")
    if not (clang and importlib.util.find_spec("metal_interpreter")):
        return None
    steps = ("--compiler", INTERPRETER, "--steps", str(_INTERPRETED_STEPS))
    description = "interpreted on the CPU, as this machine has no Metal device"
    return Runner(description, (*selfcheck.COMMAND, *steps), time_limit=300.0)


def check(
    wanted: Sequence[Case],
    runner: Runner,
    progress: Progress,
    found: Record | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Yields outcomes of the cases; if a kernel kills its process, a new process continues.

    Args:
        found: record of earlier outcomes, which stores new ones; None checks everything.
        seconds: time limit; the next run checks what is left. None for no limit.
        clock: returns seconds.
    """
    began = clock()
    known = [] if found is None else found.outcomes(wanted)
    yield from known
    remaining = [case for case in wanted if next_check(case, known) is not None]
    while remaining:
        last = None
        for outcome in selfcheck.outcomes(remaining, runner.command, runner.time_limit, found):
            last = outcome
            number = wanted.index(outcome.case) + 1
            progress(f"kernels: {number} of {len(wanted)}: {outcome.case}, {outcome.check}")
            yield outcome
            if seconds is not None and clock() - began > seconds:
                return
        remaining = remaining[remaining.index(last.case) + 1 :] if last is not None else []


def pending_checks(wanted: Sequence[Case], outcomes: Sequence[Outcome]) -> Finding | None:
    """Reports the checks that the time limit left for the next run; None if there are none."""
    if not (left := sum(next_check(case, outcomes) is not None for case in wanted)):
        return None
    seen = f"{left} of {len(wanted)} kinds of layer are not checked yet: {BUDGET:.0f} s had passed"
    advice = "Run `vllm-metal doctor --only kernels` again: it goes on from there."
    return Finding("kernels left", "warning", seen, advice)


def finding(outcomes: Sequence[Outcome], on_metal: bool) -> Finding:
    """Summarizes all outcomes in one finding."""
    outcomes = [outcome for outcome in outcomes if outcome.kernel not in CHOICES]
    cases = len({outcome.case for outcome in outcomes})
    failed = sorted({str(outcome.check) for outcome in outcomes if not outcome.ok})
    scope = f"{cases} kind{'s' * (cases > 1)} of layer"
    if not failed:
        return Finding("kernels", "ok", f"all agree with the references, in {scope}")
    advice = REPORT_BUG
    if on_metal:
        advice += (
            " A server does not use kernels that fail for its model; VLLM_METAL_KERNELS=mlx turns "
            "all kernels off."
        )
    return Finding("kernels", "failed", f"{', '.join(failed)} failed, in {scope}", advice)


def decode_speed(outcomes: Sequence[Outcome]) -> Finding | None:
    """Compares decode with MLX's attention over contiguous K and V; None if nothing was timed.

    Never warns about small layers, or those for which MLX has no such attention.
    """
    timed = [outcome for outcome in outcomes if outcome.shares]
    if not timed:
        return None
    parts, is_slow = [], False
    for outcome in timed:
        shape = outcome.case.shape
        for call, shares in outcome.shares.items():
            vs_mlx = f", {shares['mlx']:.2f} of MLX's attention" if "mlx" in shares else ""
            parts.append(f"{call} ({outcome.case}): {shares['copy']:.2f} of a copy's speed{vs_mlx}")
            is_large = shape.num_heads * shape.head_size >= _LARGE
            is_slow |= is_large and shares.get("mlx", 1.0) < LEAST_RATIO_LARGE
    seen = "; ".join(parts)
    if is_slow:
        advice = f"Close other programs and try again (--again). {REPORT_IT}"
        return Finding("speed of decode", "warning", seen, advice)
    return Finding("speed of decode", "ok", seen)


def time_all(progress: Progress, command: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Times each kernel in a child process; `command` replaces children.timing.

    Returns a message of children.timing per kernel; if it killed its process, `failed` says how.
    The first message has `bandwidth`, bytes per second of a copy, if that could be measured.
    """
    command = command or python("vllm_metal.cli.doctor.children.timing")
    found: list[dict[str, Any]] = []
    start = 0
    for _ in range(_MOST_TIMING_PROCESSES):
        with Child([*command, "--start", str(start)]) as child:
            running = None
            try:
                while (message := child.message(_TIMING_LIMIT)) is not None:
                    if "timing" in message:
                        running = message
                        progress(f"times: {message['timing']}")
                    else:
                        found.append(message)
                        running = None
                ended = child.wait(_TIMING_LIMIT)
            except StageTimeout:
                ended = child.ended(None)
        if ended.ok:
            break
        name = running["timing"] if running else "times"
        found.append({"name": name, "failed": ended.exit_reason, "log": "\n".join(ended.lines)})
        if running is None:
            break
        start = running["index"] + 1
    return found


def header() -> str:
    """Returns the column names above the lines of `row`."""
    columns = "".join(f"{kernel:>12}" for kernel in KERNELS)
    return f"{'dtype':9} {'cache':9}{'head':>5}{'block':>6} {columns}{'s':>8}"


def row(case: Case, outcomes: Sequence[Outcome]) -> str:
    """Formats the results of one case, one column per kernel."""
    by_kernel: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kernel.setdefault(outcome.kernel, []).append(outcome)
    cells = "".join(f"{_cell(by_kernel.get(kernel, [])):>12}" for kernel in KERNELS)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return (
        f"{dtype_name(case.dtype):9} {dtype_name(case.cache_dtype):9}"
        f"{case.shape.head_size:>5}{case.block_size:>6} {cells}{seconds:>8.1f}"
    )


def legend(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields lines that explain the table's cells, and describe the failures."""
    yield "ok: largest error as a share of what rounding allows; -: kernel not used, or not reached"
    for outcome in outcomes:
        if outcome.times:
            yield f"\n{outcome.check}: {outcome.fastest}, {outcome.case}"
            for call in outcome.times[BACKENDS[0]]:
                each = (f"{way} {found[call] * 1e6:.0f} µs" for way, found in outcome.times.items())
                yield f"  {call}: {', '.join(each)}"
        if not outcome.ok:
            yield f"\n{outcome.check} failed: {outcome.case}\n  {outcome.detail}"


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    if not all(outcome.ok for outcome in outcomes):
        return "FAILED"
    # The worst result counts.
    shares = [
        outcome.largest_error / outcome.tolerance
        for outcome in outcomes
        if outcome.tolerance and outcome.largest_error is not None
    ]
    return f"ok {max(shares):.2f}" if shares else "ok exact"


def times_table(timings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Formats a line per kernel; see `time_all`."""
    bandwidth = next((timing["bandwidth"] for timing in timings if "bandwidth" in timing), None)
    if bandwidth is not None:
        yield f"A copy moves {bandwidth / 1e9:.0f} GB/s here."
    yield f"{'kernel':34}{'µs':>9}{'GB/s of K/V':>13}{'of a copy':>11}"
    for timing in timings:
        if "failed" in timing:
            yield f"{timing['name']:34} failed: {timing['failed'].splitlines()[0][:100]}"
        elif "seconds" in timing:
            rate = timing["moved"] / timing["seconds"]
            share = f"{rate / bandwidth:.0%}" if bandwidth else "-"
            micros = timing["seconds"] * 1e6
            yield f"{timing['name']:34}{micros:>9.1f}{rate / 1e9:>13.1f}{share:>11}"
