# SPDX-License-Identifier: Apache-2.0
"""Times calls: a warm-up, then windows of fixed time; rejects unsteady machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from metal_kernels.selfcheck.timing import Call, queue

# Windows are fixed in time, not in calls: timings of fixed counts drift threefold on Macs, whose
# GPU clock follows the load (mlx#3837).

#: Seconds of work before the first timing and after a pause, and before any other.
WARM_UP, _AGAIN = 1.0, 0.2
#: Seconds of a pause after which the GPU's clock has dropped.
_PAUSE = 0.5
WINDOWS, WINDOW = 5, 0.4  # per timing; seconds of each
#: Seconds of calls submitted together, far below the limit at which macOS kills a process.
BATCH = 0.05
#: Limit of the second slowest window over the second fastest; above it something else runs.
_STEADY = 1.3
#: Limit of a timing over the variant's first one; above it the machine's state has changed. 28 %
#: was seen on a hot machine (mlx#3842).
_SAME = 1.2

#: Runs a number of calls to completion.
Run = Callable[[int], None]


class Unsteady(Exception):
    """The machine is hot, busy or on battery, so timings are meaningless."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call of a variant (one of the alternatives to compare), in each window."""

    variant: str
    windows: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.windows)


@dataclass
class Stopwatch:
    """Times variants (alternatives to compare) one after the other, and records the timings."""

    #: Raises Unsteady if the system reports a problem; called before each timing.
    watch: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    window: float = WINDOW  # seconds
    warm_up: float = WARM_UP
    batch: float = BATCH
    timings: list[Timing] = field(default_factory=list)
    _ended: float | None = None  # when the last timing ended

    def time(self, variant: str, run: Run) -> Timing:
        """Times calls of `run` in several windows, after a warm-up, and records the timing.

        Raises Unsteady: the windows differ too much, or the variant differs from its first timing.
        """
        self.watch()
        batch = self._warm(run)
        windows = []
        for _ in range(WINDOWS):
            calls, start = 0, self.clock()
            while (took := self.clock() - start) < self.window or not calls:
                run(batch)
                calls += batch
            windows.append(took / calls)
        self._ended = self.clock()
        return self.keep(Timing(variant, tuple(windows)))

    def keep(self, timing: Timing) -> Timing:
        """Records a timing, also one from another process.

        Raises Unsteady: see `time`.
        """
        self.timings.append(timing)
        # Drop one outlier on either side.
        variant, (_, fast, *_, slow, _) = timing.variant, sorted(timing.windows)
        if slow > fast * _STEADY:
            raise Unsteady(
                f"{variant} took {_micros(fast)} to {_micros(slow)} within seconds: something else "
                "is running, or the GPU is changing its clock"
            )
        before = next(kept.seconds for kept in self.timings if kept.variant == variant)
        if max(before, timing.seconds) > min(before, timing.seconds) * _SAME:
            raise Unsteady(
                f"{variant} took {_micros(before)} first, and {_micros(timing.seconds)} later: the "
                "machine is hot, or busy with something else"
            )
        return timing

    def time_call(self, variant: str, call: Call) -> Timing:
        """Times calls that each take the previous one's fence."""
        return self.time(variant, lambda count: queue(call, count))

    def _warm(self, run: Run) -> int:
        """Warms up; returns how many calls make up a batch."""
        run(1)  # compiles the kernel
        start, calls = self.clock(), 0
        paused = self._ended is None or start - self._ended > _PAUSE
        wanted = self.warm_up if paused else min(_AGAIN, self.warm_up)
        batch = 1
        while self.clock() - start < wanted or not calls:
            run(batch)
            calls += batch
            spent = self.clock() - start
            batch = max(1, round(calls * self.batch / spent)) if spent > 0 else 1
        return batch


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
