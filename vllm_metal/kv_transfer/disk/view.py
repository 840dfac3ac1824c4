# SPDX-License-Identifier: Apache-2.0
"""DiskView: the scheduler's side of the prefix cache on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.identity.fingerprint import PoolContent
from vllm_metal.kv_transfer.disk.block_folder import Listing, RemovedBlock
from vllm_metal.kv_transfer.store import Lookup, View


@dataclass(frozen=True)
class DiskLookup(Lookup):
    """Looks up each page on demand; never pending."""

    listing: Callable[[], Listing]  # the current one: other weights may have been loaded

    def contains(self, key: bytes) -> bool:
        return self.listing().contains(key)


class DiskView(View):
    """Looks up pages on disk by file name, without opening the files."""

    source = CacheHitSource.DISK

    def __init__(self, root: Path, content: PoolContent) -> None:
        self._root = root
        self._closed = threading.Event()
        self._fingerprint = content.fingerprint.digest
        self._listings: dict[str, Listing] = {}  # by namespace

    def use(self, content: PoolContent) -> None:
        if content.fingerprint.digest != self._fingerprint:
            self._fingerprint, self._listings = content.fingerprint.digest, {}

    def look_up(
        self,
        namespace: str | None,
        keys: Callable[[], Sequence[bytes]],
        params: Mapping[str, Any] | None,
    ) -> Lookup:
        return Lookup() if namespace is None else DiskLookup(partial(self._listing, namespace))

    def wants(self, namespace: str | None, key: bytes) -> bool:
        return namespace is not None and not self._listing(namespace).contains(key)

    def _listing(self, namespace: str) -> Listing:
        if namespace not in self._listings:
            # Listing a large folder takes long; meanwhile it asks the file system for each key.
            made = Listing(self._root / self._fingerprint / namespace)
            self._listings[namespace] = made
            load = threading.Thread(
                target=made.load, args=(self._closed.is_set,), name="prefix-cache-list", daemon=True
            )
            load.start()
        return self._listings[namespace]

    def update(self, message: list[RemovedBlock]) -> None:
        for name, stays in message:
            if name.fingerprint == self._fingerprint and name.namespace in self._listings:
                self._listings[name.namespace].forget(name.key, stays)

    def close(self) -> None:
        self._closed.set()
