# SPDX-License-Identifier: Apache-2.0
"""Finds the largest useful tile of the decode kernel among those that passed the self-check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from metal_kernels.selfcheck import timing
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, best_of
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

_REQUESTS = 8  # that verify drafts and split the context's tokens


def search(measure: Measure[int], sizes: Sequence[int]) -> Chosen:
    """Chooses the largest decode tile by speed; the prefill kernel serves requests with more rows.

    measure: times requests that fill the largest tile, in tiles of limited size. sizes: ascending.
    """
    found = best_of(measure, sizes, sizes[-1])
    return Chosen({"decode_rows": found.value}, found.gain)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    sizes, context = layer.tiles.decode, layer.context // _REQUESTS
    rows = max(sizes[-1] // layer.case.shape.group, 1)
    over = timing.Layer(layer.case, layer.context)
    calls = {
        most: over.attend(
            _REQUESTS, rows, context, replace(layer.tiles, decode=_up_to(sizes, most))
        )
        for most in sizes
    }

    def measure(most: int) -> Timing:
        return stopwatch.time_call(f"{rows} rows of each, in tiles of {most}", calls[most])

    return search(measure, sizes)


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= most)


def _wanted(layer: Layer) -> bool:
    return len(layer.tiles.decode) > 1 and "decode" in layer.case.kernels


CHOICE = Choice("tiles of drafts", _wanted, _search)
