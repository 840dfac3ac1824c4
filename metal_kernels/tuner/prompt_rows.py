# SPDX-License-Identifier: Apache-2.0
"""Finds from how many rows on a prompt attends by MLX, over what is gathered of its context."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from metal_kernels.selfcheck import WAYS
from metal_kernels.selfcheck.timing import Call, bounded
from metal_kernels.selfcheck.timing import Layer as Pool
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Duel, Measure, fewest, is_clear
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

#: Contexts that are timed, as shares of the layer's: 1k, 8k and 32k.
_SHARES = (32, 4, 1)
#: Sizes of prompts to choose from, the smallest of the layer's: three of four are timed a context.
_SIZES = 4


class Arm(NamedTuple):
    """A way of WAYS for the last so many rows of a context."""

    way: str
    rows: int
    context: int


def search(measure: Measure[Arm], contexts: Sequence[int], prompts: Sequence[int]) -> Chosen:
    """Compares both ways at some sizes over each context; MLX's has to win clearly.

    A size that is passed on the way is timed once by each way, one that is found once more in the
    other order: eight timings a context of four sizes.

    Args:
        measure: times an arm.
        contexts: positions.
        prompts: rows, ascending.
    """
    found = {str(context): _fewest(measure, context, prompts) for context in contexts}
    gains = [gain for _, gain in found.values()]
    return Chosen(
        {"prompt_rows": {context: rows for context, (rows, _) in found.items()}},
        exp(fmean(map(log, gains))),
    )


def _fewest(
    measure: Measure[Arm], context: int, prompts: Sequence[int]
) -> tuple[int | None, float]:
    """Rows from which on MLX's way wins over a context, None for never, and its gain there."""
    seen: dict[int, tuple[Timing, Timing]] = {}

    def wins(rows: int) -> bool:
        ours, mlx = (measure(Arm(way, rows, context)) for way in WAYS)
        seen[rows] = ours, mlx
        return is_clear((ours,), (mlx,))

    rows = fewest(wins, prompts)
    if rows is None:
        return None, 1.0
    mlx, ours = (measure(Arm(way, rows, context)) for way in reversed(WAYS))
    fought = Duel((seen[rows][0], ours), (seen[rows][1], mlx))
    return (rows, fought.gain) if fought.clear else (None, 1.0)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    contexts = [layer.context // share for share in _SHARES]
    over, calls = Pool(layer.case, layer.context), dict[Arm, Call]()

    def measure(arm: Arm) -> Timing:
        if arm not in calls:
            # What no command buffer may hold is timed over the context that one may.
            batch = bounded(layer.case, (1, arm.rows, max(arm.context, arm.rows)), 1)
            ours = arm.way == WAYS[0]
            calls[arm] = over.attend(*batch, layer.tiles) if ours else over.attend_gathered(*batch)
        return stopwatch.time_call(f"{arm.rows} rows of {arm.context} by {arm.way}", calls[arm])

    return search(measure, contexts, layer.prompts[:_SIZES])


def _wanted(layer: Layer) -> bool:
    return layer.gathered


CHOICE = Choice("prompts by MLX's attention", _wanted, _search)
