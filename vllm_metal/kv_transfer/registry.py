# SPDX-License-Identifier: Apache-2.0
"""STORES lists the stores that K/V are kept in outside the pool, in the order of reading."""

from __future__ import annotations

from vllm_metal.kv_transfer.disk.config import DiskConfig
from vllm_metal.kv_transfer.peer.config import PeerConfig
from vllm_metal.kv_transfer.store import StoreConfig

#: A store that others wait for stands behind those that nobody does: see `page_store.PageStore`.
STORES: tuple[type[StoreConfig], ...] = (DiskConfig, PeerConfig)
