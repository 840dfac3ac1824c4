# SPDX-License-Identifier: Apache-2.0
"""What to check of a case, how it fared, and what may serve after that."""

from __future__ import annotations

import time
from collections.abc import Iterable

from metal_kernels.paged_attention import Tiles
from metal_kernels.selfcheck.case import KERNELS, Case, Check, Outcome
from metal_kernels.selfcheck.findings import findings

#: Of one layer each; two layers make an engine's step. Sizes of a kernel's tiles share them.
STEPS = 40
_FEWEST = 12


def check(case: Case, num_steps: int = STEPS) -> list[Outcome]:
    """Checks the case's kernels by the current compiler, on MLX's default device."""
    outcomes: list[Outcome] = []
    while (following := next_check(case, outcomes)) is not None:
        outcomes.append(check_kernel(case, following, num_steps, usable(case, outcomes)))
    return outcomes


def checks(case: Case) -> list[Check]:
    """What there is to check, in order: a kernel leans on those before it."""
    sizes = Tiles.of(case.shape, case.window)
    found = []
    for kernel in KERNELS:
        if kernel not in case.kernels:
            continue
        if kernel in ("decode", "prefill"):
            found += [Check(kernel, rows) for rows in getattr(sizes, kernel)]
        elif kernel != "reduce" or sizes.split:
            found.append(Check(kernel))
    return found


def in_use(case: Case) -> list[str]:
    """Kernels that the case asks for and that attention of its shape launches at all."""
    return list(dict.fromkeys(check.kernel for check in checks(case)))


def next_check(case: Case, outcomes: Iterable[Outcome]) -> Check | None:
    """The first that has no outcome yet; None: there is no more to learn.

    Nothing comes after a kv_write that failed: all else would fail for its sake. `reduce` joins
    what other kernels leave, so it waits for one that works.
    """
    ours = {outcome.check: outcome.ok for outcome in outcomes if outcome.case == case}
    if ours.get(Check("kv_write"), True) is False:
        return None
    for check in checks(case):
        if check in ours:
            continue
        tiles = usable(case, outcomes)
        if check.kernel != "reduce" or tiles.decode or tiles.prefill:
            return check
    return None


def usable(case: Case, outcomes: Iterable[Outcome]) -> Tiles:
    """Tiles that passed; contexts may be split if `reduce` passed, too."""
    passed = {outcome.check for outcome in outcomes if outcome.case == case and outcome.ok}
    sizes = Tiles.of(case.shape, case.window)
    return Tiles(
        tuple(rows for rows in sizes.decode if Check("decode", rows) in passed),
        tuple(rows for rows in sizes.prefill if Check("prefill", rows) in passed),
        Check("reduce") in passed,
    )


def check_kernel(
    case: Case, check: Check, num_steps: int = STEPS, tiles: Tiles | None = None
) -> Outcome:
    """One check; kv_write is taken to be right.

    Args:
        case: of the layer.
        check: of checks(case).
        num_steps: how many are played.
        tiles: that `reduce` may lean on; None: all.
    """
    start = time.perf_counter()
    every = Tiles.of(case.shape, case.window)
    if check.rows is not None:
        sizes = every.decode if check.kernel == "decode" else every.prefill
        num_steps = max(num_steps // len(sizes), min(num_steps, _FEWEST))
    error = tolerance = None
    log = ""
    try:
        found = findings(case, check, num_steps, tiles or every)
        worst = max(found, key=lambda finding: finding.share)
        error, tolerance = worst.error, worst.tolerance
        detail = "" if worst.share <= 1 else worst.detail
    except Exception as failure:  # whatever a compiler or a driver raises is this check's result
        detail, log = _first_error(failure), str(failure)
    seconds = round(time.perf_counter() - start, 3)
    return Outcome(
        check.kernel, case, not detail, detail, error, tolerance, seconds, check.rows, log
    )


def _first_error(error: Exception) -> str:
    """The line that says what is wrong: a compiler's message may begin with the file's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = (line for line in lines if "error:" in line)
    return f"{type(error).__name__}: {next(wrong, lines[0] if lines else '')}"
