# SPDX-License-Identifier: Apache-2.0
"""Compares values by A-B-B-A timings, and changes a setting only if it is clearly faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, variance
from typing import Generic, TypeVar

from metal_kernels.tuner.stopwatch import Timing

#: Minimum gain of a change, in both orders (llama.cpp also uses 1.05).
LEAST_GAIN = 1.05
#: Standard errors between the mean gain and LEAST_GAIN: windows that differ by 10 % need a gain
#: of some 14 %, those of a quiet machine, 1 %, need 6 %.
_ERRORS = 3
#: Values within this ratio of the best are compared with it.
_NEAR = 1.12

ValueT = TypeVar("ValueT")
Measure = Callable[[ValueT], Timing]


@dataclass(frozen=True)
class Found(Generic[ValueT]):
    """The value that a search chose, and its speedup over the previous value."""

    value: ValueT
    gain: float  # time of the previous value over that of this one; 1: no change


@dataclass(frozen=True)
class Duel:
    """Timings of two values A and B in the order A, B, B, A."""

    first: tuple[Timing, Timing]  # A
    second: tuple[Timing, Timing]  # B

    @property
    def gains(self) -> tuple[float, float]:
        """Speedup of B over A, once with A timed first and once with B first."""
        first, last = zip(self.first, self.second, strict=True)
        return first[0].seconds / first[1].seconds, last[0].seconds / last[1].seconds

    @property
    def gain(self) -> float:
        """Speedup of B over A: the geometric mean over all windows."""
        return exp(fmean(_logs(self.first)) - fmean(_logs(self.second)))

    @property
    def clear(self) -> bool:
        """Whether B is faster in both orders by LEAST_GAIN, and by more than the noise."""
        return min(self.gains) >= LEAST_GAIN and is_clear(self.first, self.second)


def is_clear(first: Sequence[Timing], second: Sequence[Timing]) -> bool:
    """Returns whether `second` is faster by LEAST_GAIN and by more than the noise."""
    gain = fmean(_logs(first)) - fmean(_logs(second))
    noise = sqrt(sum(_squared_error(variant) for variant in (first, second)))
    return gain - _ERRORS * noise >= log(LEAST_GAIN)


def duel(measure: Measure[ValueT], first: ValueT, second: ValueT) -> Duel:
    """Times two values in an order in which a slowing machine affects both equally."""
    start, one, two, last = (measure(value) for value in (first, second, second, first))
    return Duel((start, last), (one, two))


def best_of(measure: Measure[ValueT], values: Sequence[ValueT], current: ValueT) -> Found[ValueT]:
    """Times all values; returns the fastest if clearly faster than `current`, else `current`.

    Takes one timing per value and at most 8 more. values: include the current one.
    """
    seen = {value: measure(value) for value in dict.fromkeys((current, *values))}
    order = sorted(seen, key=lambda value: seen[value].seconds)
    best, *others = order
    if best == current:
        return Found(current, 1.0)
    # Noise may rank two close values wrongly, so compare the best with its nearest rival.
    rival = next((value for value in others if value != current), None)
    if rival is not None and seen[rival].seconds <= _NEAR * seen[best].seconds:
        best = rival if duel(measure, best, rival).gain > 1 else best
    return confirmed(measure, current, best)


def confirmed(measure: Measure[ValueT], current: ValueT, other: ValueT) -> Found[ValueT]:
    """Returns `other` if it is clearly faster, else `current`; times both twice if they differ."""
    if other == current:
        return Found(current, 1.0)
    result = duel(measure, current, other)
    return Found(other, result.gain) if result.clear else Found(current, 1.0)


def fewest(wins: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """Finds by bisection the smallest of ascending sizes for which `wins` is true, or None."""
    if not wins(sizes[-1]):
        return None
    # Bisection: 1 + log2(sizes) comparisons, if one way wins from some size on.
    low, high = 0, len(sizes) - 1  # `high` wins
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(sizes[middle]) else (middle + 1, high)
    return sizes[high]


def _logs(timings: Sequence[Timing]) -> list[float]:
    return [log(window) for timing in timings for window in timing.windows]


def _squared_error(timings: Sequence[Timing]) -> float:
    """Estimates the squared standard error of the mean log time, from the spread of windows."""
    spreads = [variance([log(window) for window in timing.windows]) for timing in timings]
    return fmean(spreads) / sum(len(timing.windows) for timing in timings)
