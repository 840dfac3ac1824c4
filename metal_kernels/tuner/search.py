# SPDX-License-Identifier: Apache-2.0
"""Decides between values by timings: A-B-B-A, and a change only where it clearly pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, variance
from typing import Generic, TypeVar

from metal_kernels.tuner.stopwatch import Timing

#: A change is taken from such a gain on, in both orders (llama.cpp takes 1.05 too).
LEAST_GAIN = 1.05
#: Standard errors that the mean gain must be above LEAST_GAIN by: windows that differ by 10 % ask
#: for a gain of some 14 %, a quiet machine's 1 % for 6 %.
_ERRORS = 3
#: What comes so near to the best at first sight is compared with it.
_NEAR = 1.12

ValueT = TypeVar("ValueT")
Measure = Callable[[ValueT], Timing]


@dataclass(frozen=True)
class Found(Generic[ValueT]):
    """What a search ends with."""

    value: ValueT
    gain: float  # the time of what served before over its own; 1: nothing was changed


@dataclass(frozen=True)
class Duel:
    """Two arms, timed A-B-B-A."""

    first: tuple[Timing, Timing]  # A
    second: tuple[Timing, Timing]  # B

    @property
    def gains(self) -> tuple[float, float]:
        """Time of A over B's, with A before B and behind it."""
        before, lag = zip(self.first, self.second, strict=True)
        return before[0].seconds / before[1].seconds, lag[0].seconds / lag[1].seconds

    @property
    def gain(self) -> float:
        """Time of A over B's: the geometric mean over all windows."""
        return exp(fmean(_logs(self.first)) - fmean(_logs(self.second)))

    @property
    def clear(self) -> bool:
        """Whether B is faster in both orders by more than the noise, and by LEAST_GAIN."""
        return min(self.gains) >= LEAST_GAIN and is_clear(self.first, self.second)


def is_clear(first: Sequence[Timing], second: Sequence[Timing]) -> bool:
    """Whether the second arm is faster by more than the noise, and by LEAST_GAIN."""
    gain = fmean(_logs(first)) - fmean(_logs(second))
    noise = sqrt(sum(_squared_error(arm) for arm in (first, second)))
    return gain - _ERRORS * noise >= log(LEAST_GAIN)


def duel(measure: Measure[ValueT], first: ValueT, second: ValueT) -> Duel:
    """Times two values, so that a machine which slows down slows both alike."""
    before, one, two, lag = (measure(value) for value in (first, second, second, first))
    return Duel((before, lag), (one, two))


def best_of(measure: Measure[ValueT], values: Sequence[ValueT], current: ValueT) -> Found[ValueT]:
    """The quickest value, where it beats the current one clearly; 8 timings above their number.

    Args:
        measure: times a value.
        values: to choose from, the current one among them.
        current: what serves now.
    """
    seen = {value: measure(value) for value in dict.fromkeys((current, *values))}
    order = sorted(seen, key=lambda value: seen[value].seconds)
    best, *others = order
    if best == current:
        return Found(current, 1.0)
    rival = next((value for value in others if value != current), None)
    if rival is not None and seen[rival].seconds <= _NEAR * seen[best].seconds:
        best = rival if duel(measure, best, rival).gain > 1 else best
    return confirmed(measure, current, best)


def confirmed(measure: Measure[ValueT], current: ValueT, other: ValueT) -> Found[ValueT]:
    """The other value, where it beats the current one clearly; 4 timings, none of equal values."""
    if other == current:
        return Found(current, 1.0)
    fought = duel(measure, current, other)
    return Found(other, fought.gain) if fought.clear else Found(current, 1.0)


def fewest(wins: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """The smallest of ascending sizes from which on all win; None: the largest does not.

    Halves the sizes that are left, so a way that wins from some size on is found in
    1 + log2(sizes) comparisons.
    """
    if not wins(sizes[-1]):
        return None
    low, high = 0, len(sizes) - 1  # `high` wins
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(sizes[middle]) else (middle + 1, high)
    return sizes[high]


def _logs(arm: Sequence[Timing]) -> list[float]:
    return [log(window) for timing in arm for window in timing.windows]


def _squared_error(arm: Sequence[Timing]) -> float:
    """The error of the mean of the logarithms of an arm's windows, by their spread in a timing."""
    spreads = [variance([log(window) for window in timing.windows]) for timing in arm]
    return fmean(spreads) / sum(len(timing.windows) for timing in arm)
