# SPDX-License-Identifier: Apache-2.0
"""The kernels' results and times as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from metal_kernels.selfcheck import KERNELS, WAYS, Case, Outcome, dtype_name


def header() -> str:
    """The line of column names above the lines of `row`."""
    columns = "".join(f"{kernel:>10}" for kernel in KERNELS)
    return f"{'dtype':9} {'cache':9}{'head':>5}{'block':>6} {columns}{'s':>8}"


def row(case: Case, outcomes: Sequence[Outcome]) -> str:
    """The results of one case, one column a kernel."""
    by_kernel: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kernel.setdefault(outcome.kernel, []).append(outcome)
    cells = "".join(f"{_cell(by_kernel.get(kernel, [])):>10}" for kernel in KERNELS)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return (
        f"{dtype_name(case.dtype):9} {dtype_name(case.cache_dtype):9}"
        f"{case.shape.head_size:>5}{case.block_size:>6} {cells}{seconds:>8.1f}"
    )


def legend(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What the cells mean, and the details of what failed."""
    yield "ok: largest error as a share of what rounding allows; -: kernel not used, or not reached"
    for outcome in outcomes:
        if outcome.times:
            yield f"\n{outcome.check}: {outcome.fastest}, {outcome.case}"
            for call in outcome.times[WAYS[0]]:
                each = (f"{way} {found[call] * 1e6:.0f} µs" for way, found in outcome.times.items())
                yield f"  {call}: {', '.join(each)}"
        if not outcome.ok:
            yield f"\n{outcome.check} failed: {outcome.case}\n  {outcome.detail}"


def _cell(outcomes: Sequence[Outcome]) -> str:
    """The worst result of one kernel in one case."""
    if not outcomes:
        return "-"
    if not all(outcome.ok for outcome in outcomes):
        return "FAILED"
    shares = [
        outcome.largest_error / outcome.tolerance
        for outcome in outcomes
        if outcome.tolerance and outcome.largest_error is not None
    ]
    return f"ok {max(shares):.2f}" if shares else "ok exact"


def times_table(timings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each kernel; see `kernels.time_all`."""
    bandwidth = next((told["bandwidth"] for told in timings if "bandwidth" in told), None)
    if bandwidth is not None:
        yield f"A copy moves {bandwidth / 1e9:.0f} GB/s here."
    yield f"{'kernel':34}{'µs':>9}{'GB/s of K/V':>13}{'of a copy':>11}"
    for told in timings:
        if "failed" in told:
            yield f"{told['name']:34} failed: {told['failed'].splitlines()[0][:100]}"
        elif "seconds" in told:
            rate = told["moved"] / told["seconds"]
            share = f"{rate / bandwidth:.0%}" if bandwidth else "-"
            micros = told["seconds"] * 1e6
            yield f"{told['name']:34}{micros:>9.1f}{rate / 1e9:>13.1f}{share:>11}"
