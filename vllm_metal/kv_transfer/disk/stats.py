# SPDX-License-Identifier: Apache-2.0
"""Counters and metrics of a cache on disk."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_metal.metrics.metric import Metric


@dataclass(frozen=True)
class DiskStats:
    """Metrics of a cache. Counts and bytes are this process's unless stated otherwise."""

    daily_write_bytes: int | None  # None: no limit
    num_written: int
    num_read: int
    num_vanished: int  # files in the listing that were no longer on disk
    num_refused: Mapping[str, int]  # writes, by reason: over_budget, no_room, paused, failed
    bytes: int = Metric(
        "gauge", "vllm:prefix_cache_disk_bytes", "Bytes of all files of the prefix cache on disk."
    ).field()
    max_bytes: int = Metric(
        "gauge",
        "vllm:prefix_cache_disk_limit_bytes",
        "Limit of the prefix cache on disk in bytes (prefix_cache_bytes).",
    ).field()
    #: Counts against the daily limit.
    written_today: int = Metric(
        "gauge",
        "vllm:prefix_cache_disk_written_today_bytes",
        "Bytes that all engines have written to the prefix cache on disk today.",
    ).field()
    written_bytes: int = Metric(
        "total",
        "vllm:prefix_cache_disk_written_bytes",
        "Bytes that this engine has written to the prefix cache on disk.",
    ).field()
    read_bytes: int = Metric(
        "total",
        "vllm:prefix_cache_disk_read_bytes",
        "Bytes that this engine has read from the prefix cache on disk.",
    ).field()
    num_corrupt: int = Metric(
        "total",
        "vllm:prefix_cache_disk_corrupt",
        "Corrupt files that were removed.",
    ).field()
    num_evicted: int = Metric(
        "total",
        "vllm:prefix_cache_disk_evicted",
        "Files that this engine has evicted to make room.",
    ).field()


class Counters:
    """Thread-safe counters by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._numbers[name] += number

    def total(self) -> int:
        with self._lock:
            return self._numbers.total()

    def all(self) -> Counter[str]:
        """Returns a snapshot; missing names count 0."""
        with self._lock:
            return self._numbers.copy()
