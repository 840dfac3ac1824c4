# SPDX-License-Identifier: Apache-2.0
"""The pages of the model that is loaded, shared by the scheduler's side and the worker's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from vllm_metal.kv_transfer.disk.block_folder import BlockFolder
from vllm_metal.kv_transfer.disk.disk_cache import DiskCache
from vllm_metal.kv_transfer.fingerprint import Fingerprint

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.disk.disk_cache import DiskStats
    from vllm_metal.kv_transfer.messages import Discard

logger = init_logger(__name__)


@dataclass(frozen=True)
class Changes:
    """The figures of the disk, and what was added to the counters since they were last taken."""

    now: DiskStats
    before: DiskStats | None
    num_dropped: int  # pages that were not written because writing is slower than computing


class PageStore(KVConnectorHandshakeMetadata):
    """The folders of one fingerprint in a disk cache.

    The worker makes it, and hands it to the scheduler's side by vLLM's handshake: both run in one
    process. Lookups come from the scheduler's thread. What waits for the disk runs in `writer`, one
    thread, so that it is done in the order it was asked for.
    """

    def __init__(self, cache: DiskCache, fingerprint: Fingerprint) -> None:
        """
        Args:
            cache: the disk.
            fingerprint: of what K/V in the pool depend on.
        """
        self._cache = cache
        self.writer = ThreadPoolExecutor(1, "kv-store")
        self._lock = Lock()
        self._taken: DiskStats | None = None
        self._num_dropped = self._counted = 0
        self.switch(fingerprint)

    def switch(self, fingerprint: Fingerprint) -> None:
        """From now on pages are those of another fingerprint: other weights were loaded."""
        others = self._cache.manifests()
        if fingerprint.digest not in others and (reason := fingerprint.why_unused(others.values())):
            logger.info("%s", reason)
        self._fingerprint = fingerprint
        self._folders: dict[str, BlockFolder] = {}

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that pages are kept under."""
        return self._fingerprint

    def folder(self, namespace: str) -> BlockFolder:
        """The folder of a namespace; made when something is written."""
        if namespace not in self._folders:
            digest, facts = self._fingerprint.digest, self._fingerprint.facts
            self._folders[namespace] = self._cache.blocks(digest, facts, namespace)
        return self._folders[namespace]

    def takes_pages(self) -> bool:
        """Whether a page that is not there would be written now."""
        return self._cache.takes_blocks()

    def touch(self, namespace: str, keys: Sequence[bytes], used_at: float) -> None:
        """Marks the pages of a text, from its first block on, as used; returns at once."""
        folder = self.folder(namespace)
        self.writer.submit(folder.touch, keys, used_at)

    def discard(self, discard: Discard) -> None:
        """Removes pages once all that was handed to the writer before is written."""
        folder = self.folder(discard.namespace)

        def remove() -> None:
            folder.discard(discard.keys)
            discard.done.set()

        self.writer.submit(remove)

    def count_dropped(self, num_pages: int) -> None:
        """Pages that will not be written."""
        with self._lock:
            self._num_dropped += num_pages

    def take_changes(self) -> Changes | None:
        """The figures, and those of the call before; None where this process has done nothing."""
        with self._lock:
            counted = self._cache.num_counted()  # first: threads go on counting meanwhile
            if self._taken is not None and counted == self._counted and not self._num_dropped:
                return None
            changes = Changes(self._cache.stats(), self._taken, self._num_dropped)
            self._taken, self._counted, self._num_dropped = changes.now, counted, 0
        return changes

    def close(self) -> None:
        """Ends the thread; what it has not begun is not written."""
        self.writer.shutdown(wait=True, cancel_futures=True)
        self._cache.close()
