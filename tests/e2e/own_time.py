# SPDX-License-Identifier: Apache-2.0
"""How long this process took for something, less what other processes kept it waiting.

Linux counts for each thread the time for which it was ready to run and had no processor
(Documentation/scheduler/sched-stats.rst). A bound on the rest holds on a machine that is busy, too.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")
_THREADS = Path("/proc/self/task")


def own_time(call: Callable[[], _Result]) -> tuple[_Result, float]:
    """What a call returns, and the seconds that it took less those without a processor.

    They are those of the thread that waited longest: of several, some wait at the same time, or for
    nothing that the call needs. Elsewhere than on Linux nothing is known of them, and it is the
    time of a clock.
    """
    before, began = _waited(), time.monotonic()
    result = call()
    took = time.monotonic() - began
    waits = [seconds - before.get(thread, 0.0) for thread, seconds in _waited().items()]
    return result, took - max(waits, default=0.0)


def _waited() -> dict[str, float]:
    """Seconds by thread."""
    found = {}
    for thread in _THREADS.iterdir() if _THREADS.exists() else ():
        with suppress(OSError):  # it has ended meanwhile
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found
