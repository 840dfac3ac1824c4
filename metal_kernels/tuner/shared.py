# SPDX-License-Identifier: Apache-2.0
"""Finds how many key reads must be saved for requests to read a common prefix together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from metal_kernels.paged_attention.common_prefix import LEAST_SAVED
from metal_kernels.selfcheck import timing
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, duel, fewest
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

_MOST_REQUESTS = 16
#: Divisors of a request's part of the context, for lengths of the common prefix.
_SHARES = (16, 8, 4, 2, 1)
_TAIL = 256  # positions that are not shared


class Variant(NamedTuple):
    """A timed alternative: requests that read a common prefix together, or each by itself."""

    shares: bool
    common: int


def search(measure: Measure[Variant], lengths: Sequence[int], saved: int) -> Chosen:
    """Finds the shortest prefix that is faster to share; keeps the default without a clear gain.

    lengths: positions of the prefix, ascending. saved: tiles that need not read the prefix.
    """
    gains = {}

    def shares(common: int) -> bool:
        return common * saved >= LEAST_SAVED

    def wins(common: int) -> bool:
        by_default = shares(common)
        result = duel(measure, Variant(by_default, common), Variant(not by_default, common))
        gains[common] = result.gain
        return by_default != result.clear

    found = fewest(wins, lengths)
    if found is None:
        gain = gains[lengths[-1]] if shares(lengths[-1]) else 1.0
        return Chosen({"shared": None}, gain)
    below = [length for length in lengths if length < found]
    if shares(found) and not (below and shares(below[-1])):
        return Chosen({"shared": LEAST_SAVED})
    gain = gains.get(found if not shares(found) else below[-1], 1.0)
    return Chosen({"shared": found * saved}, gain)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    requests = _requests(layer)
    longest, block = layer.context // requests, layer.case.block_size
    lengths = sorted({max(longest // share // block, 1) * block for share in _SHARES})
    over = timing.Layer(layer.case, requests * (lengths[-1] + _TAIL))
    calls: dict[Variant, timing.Call] = {}

    def measure(variant: Variant) -> Timing:
        if variant not in calls:
            tiles = replace(layer.tiles, shared=0 if variant.shares else None)
            context = variant.common + _TAIL
            calls[variant] = over.attend(requests, 1, context, tiles, common=variant.common)
        way = "shared" if variant.shares else "read apart"
        what = f"{requests} x {variant.common + _TAIL}, {variant.common} in common {way}"
        return stopwatch.time_call(what, calls[variant])

    return search(measure, lengths, requests - 1)


def _requests(layer: Layer) -> int:
    """Returns the number of requests whose rows fill the largest tile, within _MOST_REQUESTS."""
    return min(layer.tiles.decode[-1] // layer.case.shape.group, _MOST_REQUESTS)


def _wanted(layer: Layer) -> bool:
    attends = layer.tiles.split and "decode" in layer.case.kernels and bool(layer.tiles.decode)
    return attends and layer.case.window is None and _requests(layer) > 1


CHOICE = Choice("shared prefixes", _wanted, _search)
