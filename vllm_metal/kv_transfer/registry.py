# SPDX-License-Identifier: Apache-2.0
"""STORES lists the stores for K/V outside the pool, in reading order."""

from __future__ import annotations

from vllm_metal.kv_transfer.disk.config import DiskConfig
from vllm_metal.kv_transfer.peer.config import PeerConfig
from vllm_metal.kv_transfer.store import StoreConfig

#: Stores that others wait for come last; see `page_store.PageStore`.
STORES: tuple[type[StoreConfig], ...] = (DiskConfig, PeerConfig)
