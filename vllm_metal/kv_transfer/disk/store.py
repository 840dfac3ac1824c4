# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on disk as a store of pages: DiskStore keeps them, DiskView looks them up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.kv_transfer.disk.block_folder import BlockFolder, Listing
from vllm_metal.kv_transfer.disk.disk_cache import DiskCache
from vllm_metal.kv_transfer.disk.space import Written
from vllm_metal.kv_transfer.disk.stats import DiskStats
from vllm_metal.kv_transfer.fingerprint import PoolContent
from vllm_metal.kv_transfer.store import Lookup, Shelf, Store, View

logger = init_logger(__name__)


@dataclass(frozen=True)
class Gone:
    """A block that is not to be found any more."""

    fingerprint: str
    namespace: str
    key: bytes
    stays: bool  # a bad file, which cannot be removed


@dataclass(frozen=True)
class DiskShelf(Shelf):
    """The blocks of a namespace's folder."""

    folder: BlockFolder
    cache: DiskCache

    def wants(self, key: bytes) -> bool:
        return self.cache.takes_blocks() and not self.folder.contains(key)

    def write(self, key: bytes, row: np.ndarray, used_at: float, depth: int) -> bool:
        return self.folder.write(key, row.data, used_at, depth) is Written.STORED

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hint: Any,
        wanted: Callable[[], bool],
    ) -> set[int]:
        pages = enumerate(zip(keys, rows, strict=True))
        return {i for i, (key, row) in pages if wanted() and self.folder.read(key, row.data)}

    def touch(self, keys: Sequence[bytes], used_at: float) -> None:
        self.folder.touch(keys, used_at)

    def discard(self, keys: Iterable[bytes]) -> None:
        self.folder.discard(keys)


class DiskStore(Store):
    """Keeps pages in a folder that engines share, one folder in it for each content and namespace.

    Its news are the blocks that went; those that came are found by looking.
    """

    def __init__(self, make_cache: Callable[..., DiskCache]) -> None:
        """
        Args:
            make_cache: makes a `DiskCache`, given whom to tell of blocks that are gone.
        """
        self._gone: SimpleQueue[Gone] = SimpleQueue()
        self.cache = make_cache(forgotten=lambda *block: self._gone.put(Gone(*block)))
        self._content: PoolContent | None = None
        self._counted = -1  # figures were never told

    def use(self, content: PoolContent) -> None:
        fingerprint, others = content.fingerprint, self.cache.manifests()
        if fingerprint.digest not in others and (reason := fingerprint.why_unused(others.values())):
            logger.info("%s", reason)
        self._content = content

    def shelf(self, namespace: str | None) -> DiskShelf | None:
        assert self._content is not None
        if namespace is None:
            return None
        fingerprint = self._content.fingerprint
        folder = self.cache.blocks(fingerprint.digest, fingerprint.facts, namespace)
        return DiskShelf(folder, self.cache)

    def news(self) -> list[Gone] | None:
        return [self._gone.get() for _ in range(self._gone.qsize())] or None

    def figures(self) -> DiskStats | None:
        counted = self.cache.num_counted()  # first: threads go on counting meanwhile
        if counted == self._counted:
            return None
        self._counted = counted
        return self.cache.stats()

    def close(self) -> None:
        self.cache.close()


class DiskLookup(Lookup):
    """What a folder has now; it is looked at for each page, and need not be asked before."""

    def __init__(self, listing: Callable[[], Listing]) -> None:
        """
        Args:
            listing: of the folder, at any time: other weights may have been loaded.
        """
        self._listing = listing

    def contains(self, key: bytes) -> bool:
        return self._listing().contains(key)


class DiskView(View):
    """Looks for files by their names; never opens one."""

    source = CacheHitSource.DISK

    def __init__(self, root: Path, content: PoolContent) -> None:
        """
        Args:
            root: the folder of the cache.
            content: what pages the worker has.
        """
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
            made = Listing(self._root / self._fingerprint / namespace)
            self._listings[namespace] = made
            load = threading.Thread(
                target=made.load, args=(self._closed.is_set,), name="prefix-cache-list", daemon=True
            )
            load.start()
        return self._listings[namespace]

    def hear(self, news: list[Gone]) -> None:
        for gone in news:
            if gone.fingerprint == self._fingerprint and gone.namespace in self._listings:
                self._listings[gone.namespace].forget(gone.key, gone.stays)

    def close(self) -> None:
        self._closed.set()
