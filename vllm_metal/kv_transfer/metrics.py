# SPDX-License-Identifier: Apache-2.0
"""Figures of disk and peers for /metrics, beside those of vLLM's offloading connector."""

from __future__ import annotations

from collections.abc import Mapping
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
_OUTBOX, _OUTBOX_LIMIT = "vllm:kv_outbox_bytes", "vllm:kv_outbox_limit_bytes"
_LEASED, _REFUSED = "vllm:kv_outbox_leased_bytes", "vllm:kv_outbox_refused"
_OUTBOX_EVICTED = "vllm:kv_outbox_evicted"
_SENT, _FETCHED = "vllm:kv_peer_sent_bytes", "vllm:kv_peer_fetched_bytes"
_FAILED, _PEER_CORRUPT = "vllm:kv_peer_failed_fetches", "vllm:kv_peer_corrupt_pages"

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
    _OUTBOX: OffloadingGaugeMetadata("Bytes of pages that peers may ask for."),
    _OUTBOX_LIMIT: OffloadingGaugeMetadata("Most bytes of those (outbox_bytes)."),
    _LEASED: OffloadingGaugeMetadata("Bytes of those that peers have asked for and not got yet."),
    _REFUSED: OffloadingCounterMetadata("Pages that the outbox had no room for."),
    _OUTBOX_EVICTED: OffloadingCounterMetadata("Pages that left the outbox to make room."),
    _SENT: OffloadingCounterMetadata("Bytes of pages that peers got from this engine."),
    _FETCHED: OffloadingCounterMetadata("Bytes of pages that this engine got from peers."),
    _FAILED: OffloadingCounterMetadata("Requests to peers that did not bring all pages."),
    _PEER_CORRUPT: OffloadingCounterMetadata("Pages of peers whose checksum was wrong."),
}
_DISK_GAUGES = {_BYTES: "bytes", _LIMIT: "max_bytes", _WRITTEN_TODAY: "written_today"}
_DISK_COUNTERS = {
    _WRITTEN: "written_bytes",
    _READ: "read_bytes",
    _CORRUPT: "num_corrupt",
    _EVICTED: "num_evicted",
}
_PEER_GAUGES = {
    _OUTBOX: "outbox_bytes",
    _OUTBOX_LIMIT: "outbox_limit_bytes",
    _LEASED: "leased_bytes",
}
_PEER_COUNTERS = {
    _REFUSED: "num_refused",
    _OUTBOX_EVICTED: "num_evicted",
    _SENT: "sent_bytes",
    _FETCHED: "fetched_bytes",
    _FAILED: "num_failed",
    _PEER_CORRUPT: "num_corrupt",
}


def transfer_stats(changes: Changes) -> OffloadingConnectorStats:
    """What vLLM's logger adds to its metrics: gauges as they are, counters by what was added."""
    stats = OffloadingConnectorStats()
    _add(stats, changes.disk, changes.disk_before, _DISK_GAUGES, _DISK_COUNTERS)
    _add(stats, changes.peers, changes.peers_before, _PEER_GAUGES, _PEER_COUNTERS)
    if changes.num_dropped:
        stats.increase_counter(_DROPPED, changes.num_dropped)
    return stats


def _add(
    stats: OffloadingConnectorStats,
    now: object | None,
    before: object | None,
    gauges: Mapping[str, str],
    counters: Mapping[str, str],
) -> None:
    """Adds figures; `gauges` and `counters` name their fields."""
    if now is None:
        return
    for name, field in gauges.items():
        stats.set_gauge(name, getattr(now, field))
    for name, field in counters.items():
        if added := getattr(now, field) - (0 if before is None else getattr(before, field)):
            stats.increase_counter(name, added)
