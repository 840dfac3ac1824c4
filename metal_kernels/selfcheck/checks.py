# SPDX-License-Identifier: Apache-2.0
"""Runs a case's checks in order, and decides which tiles are usable after them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from metal_kernels.paged_attention import Tiles
from metal_kernels.paged_attention.tiles import WIDE_ROWS
from metal_kernels.selfcheck import contiguous, state_timing, states, timing
from metal_kernels.selfcheck.case import CHOICES, KERNELS, Case, Check, Outcome, StateKind
from metal_kernels.selfcheck.findings import findings

#: Steps of one layer per kernel. A kernel's sizes of tiles share them.
STEPS = 40
_FEWEST = 12
#: Checks that require another one to pass.
_NEEDS = {"gathered": "kv_gather", "decode_way": "kv_gather", "prefill_way": "gathered"}


def checks(case: Case) -> list[Check]:
    """Returns a case's checks in order; checks rely on kernels that were checked before."""
    sizes = Tiles.for_layer(case.shape, case.window)
    kind = case.states or StateKind()
    of_states = {
        "convolution": bool(kind.channels),
        "recurrence": kind.heads is not None,
        "recurrence_way": kind.has_chunks,
        "rotation": case.rotation is not None,
    }
    wanted = {name for name in case.kernels if of_states.get(name, True)}
    found = []
    for kernel in KERNELS:
        if kernel not in wanted:
            continue
        if kernel in ("decode", "prefill"):
            found += [Check(kernel, rows) for rows in getattr(sizes, kernel)]
            if kernel == "decode" and sizes.wide:
                found.append(Check(kernel, WIDE_ROWS, True))
        elif kernel != "reduce" or sizes.split:
            found.append(Check(kernel))
    return found + [Check(choice) for choice in CHOICES if choice in wanted]


def next_check(case: Case, outcomes: Iterable[Outcome]) -> Check | None:
    """Returns the first check without an outcome; None: nothing is left to check.

    After a failure of kv_write nothing else is checked, since it would fail for that reason.
    `reduce` joins results of decode or prefill, and `graph` runs them in a graph, so both need a
    tile that passed. A check with 512 threads needs the same tile to pass with 256. A timing of
    alternatives (CHOICES) needs all of them to pass.
    """
    ours = {outcome.check: outcome.ok for outcome in outcomes if outcome.case == case}
    if ours.get(Check("kv_write"), True) is False:
        return None
    for check in checks(case):
        if check in ours:
            continue
        tiles = usable(case, outcomes)
        attends = bool(tiles.decode or tiles.prefill)
        if check.wide and not ours.get(check._replace(wide=False)):
            continue
        if check.kernel == "recurrence_way":
            if ours.get(Check("recurrence")):
                return check
            continue
        if check.kernel in _NEEDS and not ours.get(Check(_NEEDS[check.kernel])):
            continue
        if check.kernel in CHOICES and not attends:
            continue
        if check.kernel not in ("reduce", "graph") or attends:
            return check
    return None


def usable(case: Case, outcomes: Iterable[Outcome]) -> Tiles:
    """Returns the tiles that passed; contexts may be split if `reduce` passed."""
    passed = {outcome.check for outcome in outcomes if outcome.case == case and outcome.ok}
    sizes = Tiles.for_layer(case.shape, case.window)
    wide = {Check("decode", WIDE_ROWS), Check("decode", WIDE_ROWS, True)}
    return Tiles(
        tuple(rows for rows in sizes.decode if Check("decode", rows) in passed),
        tuple(rows for rows in sizes.prefill if Check("prefill", rows) in passed),
        Check("reduce") in passed,
        wide=wide <= passed,
    )


def check_kernel(
    case: Case, check: Check, num_steps: int = STEPS, tiles: Tiles | None = None
) -> Outcome:
    """Runs one check of checks(case); all but that of kv_write rely on kv_write.

    tiles: tiles that passed, for `reduce`, `graph` and CHOICES; None: all.
    """
    start = time.perf_counter()
    every = Tiles.for_layer(case.shape, case.window)
    if check.rows is not None:
        sizes = every.decode if check.kernel == "decode" else every.prefill
        num_steps = max(num_steps // len(sizes), min(num_steps, _FEWEST))
    # The host also computes these token by token, or with many rows.
    if check.kernel in ("recurrence", "gathered"):
        num_steps = min(num_steps, _FEWEST)
    error = tolerance = None
    log = detail = ""
    times: dict[str, dict[str, float]] = {}
    shares: dict[str, dict[str, float]] = {}
    try:
        if check.kernel == "recurrence_way":
            times = state_timing.compare(case)
        elif check.kernel in CHOICES:
            times = timing.compare(case, check.kernel, tiles or every)
            if check.kernel == "decode_way":
                shares = contiguous.decode_shares(case, times, timing.copy_bandwidth(2**27))
        else:
            if check.kernel in ("convolution", "recurrence"):
                found = states.findings(case, check.kernel, num_steps)
            else:
                found = findings(case, check, num_steps, tiles or every)
            worst = max(found, key=lambda finding: finding.share)
            error, tolerance = worst.error, worst.tolerance
            detail = "" if worst.share <= 1 else worst.detail
    except Exception as failure:  # compiler and driver errors are the check's outcome
        detail, log = _first_error(failure), str(failure)
    seconds = round(time.perf_counter() - start, 3)
    return Outcome(
        *(check.kernel, case, not detail, detail, error, tolerance, seconds),
        *(check.rows, check.wide, log),
        times=times,
        shares=shares,
    )


def _first_error(error: Exception) -> str:
    """Returns the error line of a compiler's message, which may begin with the kernel's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = (line for line in lines if "error:" in line)
    return f"{type(error).__name__}: {next(wrong, lines[0] if lines else '')}"
