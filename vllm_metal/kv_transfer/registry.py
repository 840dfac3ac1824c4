# SPDX-License-Identifier: Apache-2.0
"""The kinds of stores that K/V are kept in outside the pool, in the order that they are read in."""

from __future__ import annotations

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingMetricMetadata

from vllm_metal.kv_transfer.disk.config import DiskConfig
from vllm_metal.kv_transfer.peer.config import PeerConfig
from vllm_metal.kv_transfer.store import StoreConfig

#: A store that others wait for stands behind those that nobody does: see `page_store.Shelves`.
STORES: tuple[type[StoreConfig], ...] = (DiskConfig, PeerConfig)
BY_NAME = {kind.name: kind for kind in STORES}

#: Counts pages that no store got. Its name is older than the other stores.
DROPPED = "vllm:prefix_cache_disk_dropped"

#: Metrics of all stores by their names, whether they are in use or not.
METRICS: dict[str, OffloadingMetricMetadata] = {
    metric.name: metric.metadata for kind in STORES for metric in kind.metrics
} | {DROPPED: OffloadingCounterMetadata("Pages not written, for the disk was slower than prefill.")}
