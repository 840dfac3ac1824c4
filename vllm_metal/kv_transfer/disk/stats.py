# SPDX-License-Identifier: Apache-2.0
"""What a cache has done: figures for metrics."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DiskStats:
    """Figures of a cache. Numbers and bytes are of this process unless it says otherwise."""

    bytes: int  # of all files under the root, whoever wrote them
    max_bytes: int
    written_today: int  # bytes, of all engines; what counts against the budget
    daily_write_bytes: int | None
    written_bytes: int  # of files that were stored
    read_bytes: int  # of files that were read and were good
    num_written: int
    num_read: int
    num_corrupt: int  # files that were truncated, changed or unreadable
    num_vanished: int  # files that the index knew and the disk did not have
    num_evicted: int
    num_refused: Mapping[str, int]  # writes, by reason: over_budget, no_room, paused, failed


class Counters:
    """Numbers that threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._total = 0

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._numbers[name] += number
            self._total += number

    def total(self) -> int:
        """The sum of all numbers."""
        return self._total

    def all(self) -> Counter[str]:
        """All numbers, at one time; 0 for what was never added to."""
        with self._lock:
            return self._numbers.copy()
