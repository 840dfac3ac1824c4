# SPDX-License-Identifier: Apache-2.0
"""Which kernels of a case to check, and how each fared."""

from __future__ import annotations

import time

from metal_kernels.selfcheck.case import KERNELS, Case, Outcome
from metal_kernels.selfcheck.findings import findings
from metal_kernels.selfcheck.play import plan
from metal_kernels.selfcheck.steps import layouts

#: Of one layer each; two layers make an engine's step.
STEPS = 40


def check(case: Case, num_steps: int = STEPS) -> list[Outcome]:
    """Checks the case's kernels by the current compiler, on MLX's default device.

    Nothing after a kv_write that failed: all else would fail for its sake.
    """
    outcomes: list[Outcome] = []
    for kernel in in_use(case):
        outcomes.append(check_kernel(case, kernel, num_steps))
        if kernel == "kv_write" and not outcomes[-1].ok:
            break
    return outcomes


def in_use(case: Case) -> list[str]:
    """Kernels that the case asks for and that attention of its shape launches at all."""
    return [kernel for kernel in KERNELS if kernel in case.kernels and _launched(case, kernel)]


def _launched(case: Case, kernel: str) -> bool:
    if kernel not in ("decode", "prefill", "reduce"):
        return True
    plans = [plan(case, layout) for layout in layouts(case, kernel, count=4)]
    launches = [launch for plan in plans for launch in plan.dispatches]
    if kernel == "reduce":
        return any(launch.num_splits > 1 for launch in launches)
    return any(launch.decode == (kernel == "decode") for launch in launches)


def check_kernel(case: Case, kernel: str, num_steps: int = STEPS) -> Outcome:
    """Checks one kernel of KERNELS; kv_write is taken to be right."""
    start = time.perf_counter()
    try:
        worst = max(findings(case, kernel, num_steps), key=lambda finding: finding.share)
    except Exception as error:  # whatever a compiler or a driver raises is this check's result
        seconds = round(time.perf_counter() - start, 3)
        return Outcome(kernel, case, False, _first_error(error), seconds=seconds, log=str(error))
    ok = worst.share <= 1
    detail = "" if ok else worst.detail
    seconds = round(time.perf_counter() - start, 3)
    return Outcome(kernel, case, ok, detail, worst.error, worst.tolerance, seconds)


def _first_error(error: Exception) -> str:
    """The line that says what is wrong: a compiler's message may begin with the file's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = (line for line in lines if "error:" in line)
    return f"{type(error).__name__}: {next(wrong, lines[0] if lines else '')}"
