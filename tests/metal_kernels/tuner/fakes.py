# SPDX-License-Identifier: Apache-2.0
"""A clock that only work advances, and machines of known speed, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from metal_kernels.tuner.stopwatch import Run, Stopwatch, Timing


@dataclass
class Machine:
    """A machine on which work takes its given time, times noise, times a drift."""

    seed: int = 0
    noise: float = 0.0  # relative noise of each call to `run`
    #: Maps the seconds since the start to the machine's slowdown.
    slower: Callable[[float], float] = lambda now: 1.0
    now: float = 0.0
    stopwatch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.stopwatch = Stopwatch(clock=lambda: self.now, window=0.03)

    def work(self, seconds: float) -> Run:
        """Returns calls of `seconds` each. One run fills a window, so its noise is not averaged."""

        def run(count: int) -> None:
            noise = 1 + self._random.uniform(-self.noise, self.noise)
            self.now += count * seconds * noise * self.slower(self.now)

        return run

    def time(self, variant: object, seconds: float) -> Timing:
        return self.stopwatch.time(str(variant), self.work(seconds))


class Once(Stopwatch):
    """Runs each variant a few times, however long it takes."""

    def __init__(self) -> None:
        super().__init__(window=0.0, warm_up=0.0, batch=0.0)

    def keep(self, timing: Timing) -> Timing:
        self.timings.append(timing)
        return timing
