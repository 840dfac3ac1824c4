# SPDX-License-Identifier: Apache-2.0
"""Figures of the disk for /metrics, beside those that vLLM's offloading connector exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import Changes

_BYTES, _LIMIT = "vllm:prefix_cache_disk_bytes", "vllm:prefix_cache_disk_limit_bytes"
_WRITTEN_TODAY = "vllm:prefix_cache_disk_written_today_bytes"
_WRITTEN, _READ = "vllm:prefix_cache_disk_written_bytes", "vllm:prefix_cache_disk_read_bytes"
_CORRUPT, _EVICTED = "vllm:prefix_cache_disk_corrupt", "vllm:prefix_cache_disk_evicted"
_DROPPED = "vllm:prefix_cache_disk_dropped"

#: Every figure by its name.
DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    _BYTES: OffloadingGaugeMetadata("Bytes of all files of the prefix cache on disk."),
    _LIMIT: OffloadingGaugeMetadata("Most bytes those files may take (prefix_cache_bytes)."),
    _WRITTEN_TODAY: OffloadingGaugeMetadata("Bytes that all engines have written there today."),
    _WRITTEN: OffloadingCounterMetadata("Bytes that this engine has written there."),
    _READ: OffloadingCounterMetadata("Bytes that this engine has read from there."),
    _CORRUPT: OffloadingCounterMetadata("Files that were not what was written, and removed."),
    _EVICTED: OffloadingCounterMetadata("Files that this engine has removed to make room."),
    _DROPPED: OffloadingCounterMetadata("Pages not written, for the disk was slower than prefill."),
}


def disk_stats(changes: Changes) -> OffloadingConnectorStats:
    """What vLLM's logger adds to its metrics: gauges as they are, counters by what was added."""
    stats, now, before = OffloadingConnectorStats(), changes.now, changes.before
    for name, value in (
        (_BYTES, now.bytes),
        (_LIMIT, now.max_bytes),
        (_WRITTEN_TODAY, now.written_today),
    ):
        stats.set_gauge(name, value)
    for name, field in (
        (_WRITTEN, "written_bytes"),
        (_READ, "read_bytes"),
        (_CORRUPT, "num_corrupt"),
        (_EVICTED, "num_evicted"),
    ):
        if added := getattr(now, field) - (0 if before is None else getattr(before, field)):
            stats.increase_counter(name, added)
    if changes.num_dropped:
        stats.increase_counter(_DROPPED, changes.num_dropped)
    return stats
