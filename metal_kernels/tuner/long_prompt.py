# SPDX-License-Identifier: Apache-2.0
"""Finds the number of rows from which a prompt uses MLX's chunked recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from metal_kernels.selfcheck import BACKENDS
from metal_kernels.selfcheck.state_timing import backend_calls
from metal_kernels.selfcheck.timing import Call
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, duel, fewest
from metal_kernels.tuner.stopwatch import Stopwatch, Timing


class Variant(NamedTuple):
    """A timed alternative: our kernel or MLX's function, for a prompt of `rows` rows."""

    backend: str
    rows: int


def search(measure: Measure[Variant], prompts: Sequence[int]) -> Chosen:
    """Finds the size of prompts from which on MLX's function is clearly faster than our kernel.

    prompts: numbers of rows, ascending.
    """
    gains = {}

    def wins(rows: int) -> bool:
        result = duel(measure, *(Variant(backend, rows) for backend in BACKENDS))
        gains[rows] = result.gain
        return result.clear

    found = fewest(wins, prompts)
    return Chosen({"long_prompt": found}, 1.0 if found is None else gains[found])


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    calls: dict[Variant, Call] = {}

    def measure(variant: Variant) -> Timing:
        if variant not in calls:
            variants = (Variant(backend, variant.rows) for backend in BACKENDS)
            calls.update(zip(variants, backend_calls(layer.case, variant.rows), strict=True))
        return stopwatch.time_call(
            f"{variant.rows} rows through states by {variant.backend}", calls[variant]
        )

    return search(measure, layer.prompts)


def _wanted(layer: Layer) -> bool:
    kind = layer.case.states
    return layer.states and kind is not None and kind.has_chunks


CHOICE = Choice("long prompts through states", _wanted, _search)
