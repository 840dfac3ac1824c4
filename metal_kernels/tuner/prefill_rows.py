# SPDX-License-Identifier: Apache-2.0
"""Finds the largest tile that prompts are cut into, of those that the self-check found right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metal_kernels.selfcheck import timing
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, best_of
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

_SHARE = 8  # of the context, the rows of the prompt's chunk that is timed


def search(measure: Measure[int], sizes: Sequence[int]) -> Chosen:
    """Times a chunk in tiles of each size.

    Args:
        measure: times tiles of so many packed rows at most.
        sizes: ascending; the largest serves now.
    """
    found = best_of(measure, sizes, sizes[-1])
    return Chosen({"prefill_rows": found.value}, found.gain)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    context = layer.context // _SHARE
    rows = context // _SHARE
    over = timing.Layer(layer.case, context)
    calls = {
        most: over.attend(
            1, rows, context, replace(layer.tiles, prefill=_up_to(layer.tiles.prefill, most))
        )
        for most in layer.tiles.prefill
    }

    def measure(most: int) -> Timing:
        return stopwatch.time_call(f"{rows} of {context} in tiles of {most}", calls[most])

    return search(measure, layer.tiles.prefill)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= most)


def _wanted(layer: Layer) -> bool:
    return len(layer.tiles.prefill) > 1 and "prefill" in layer.case.kernels


CHOICE = Choice("tiles of prompts", _wanted, _search)
