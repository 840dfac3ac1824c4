# SPDX-License-Identifier: Apache-2.0
"""Finds the number of rows from which MLX attends over a prompt's gathered context."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from metal_kernels.selfcheck import BACKENDS
from metal_kernels.selfcheck.timing import Call, bounded
from metal_kernels.selfcheck.timing import Layer as Pool
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Duel, Measure, fewest, is_clear
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

#: Divisors of the layer's context for the timed contexts: 1k, 8k and 32k.
_SHARES = (32, 4, 1)
#: Number of smallest prompt sizes to choose from; three of four are timed per context.
_SIZES = 4


class Variant(NamedTuple):
    """A timed alternative: our kernel or MLX's attention, for a context's last `rows`."""

    backend: str
    rows: int
    context: int


def search(measure: Measure[Variant], contexts: Sequence[int], prompts: Sequence[int]) -> Chosen:
    """Finds, for each context length, the number of rows from which MLX's attention is faster.

    contexts: numbers of positions. prompts: numbers of rows, ascending.
    """
    # Rejected sizes are timed once per backend, the result once more in the other order: eight
    # timings per context for four sizes.
    found = {str(context): _fewest(measure, context, prompts) for context in contexts}
    gains = [gain for _, gain in found.values()]
    return Chosen(
        {"prompt_rows": {context: rows for context, (rows, _) in found.items()}},
        exp(fmean(map(log, gains))),
    )


def _fewest(
    measure: Measure[Variant], context: int, prompts: Sequence[int]
) -> tuple[int | None, float]:
    """Returns the number of rows from which MLX's attention wins, or None, and its gain there."""
    seen: dict[int, tuple[Timing, Timing]] = {}

    def wins(rows: int) -> bool:
        ours, mlx = (measure(Variant(backend, rows, context)) for backend in BACKENDS)
        seen[rows] = ours, mlx
        return is_clear((ours,), (mlx,))

    rows = fewest(wins, prompts)
    if rows is None:
        return None, 1.0
    mlx, ours = (measure(Variant(backend, rows, context)) for backend in reversed(BACKENDS))
    result = Duel((seen[rows][0], ours), (seen[rows][1], mlx))
    return (rows, result.gain) if result.clear else (None, 1.0)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    contexts = [layer.context // share for share in _SHARES]
    over, calls = Pool(layer.case, layer.context), dict[Variant, Call]()

    def measure(variant: Variant) -> Timing:
        if variant not in calls:
            # A context that exceeds a command buffer is timed with the largest one that fits.
            batch = bounded(layer.case, (1, variant.rows, max(variant.context, variant.rows)), 1)
            ours = variant.backend == BACKENDS[0]
            calls[variant] = (
                over.attend(*batch, layer.tiles) if ours else over.attend_gathered(*batch)
            )
        return stopwatch.time_call(
            f"{variant.rows} rows of {variant.context} by {variant.backend}", calls[variant]
        )

    return search(measure, contexts, layer.prompts[:_SIZES])


def _wanted(layer: Layer) -> bool:
    return layer.gathered


CHOICE = Choice("prompts by MLX's attention", _wanted, _search)
