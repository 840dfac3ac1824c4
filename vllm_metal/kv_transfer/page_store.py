# SPDX-License-Identifier: Apache-2.0
"""The pages of the model that is loaded, shared by the scheduler's side and the worker's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from vllm_metal.kv_transfer.disk.written import Written
from vllm_metal.kv_transfer.fingerprint import Fingerprint
from vllm_metal.kv_transfer.peers import NOTHING, Asked

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.disk.block_folder import BlockFolder
    from vllm_metal.kv_transfer.disk.disk_cache import DiskCache
    from vllm_metal.kv_transfer.disk.stats import DiskStats
    from vllm_metal.kv_transfer.messages import Discard, RequestPlace
    from vllm_metal.kv_transfer.peer.client import Peer
    from vllm_metal.kv_transfer.peer.outbox import Outbox
    from vllm_metal.kv_transfer.peering import Peering, PeeringStats

logger = init_logger(__name__)


@dataclass(frozen=True)
class Shelf:
    """Where pages of one fingerprint and namespace go: a folder, the outbox of peers, or both."""

    folder: BlockFolder | None
    outbox: Outbox | None
    generation: int = 0  # of the outbox: once it was cleared, pages of before do not go there

    def lacks(self, key: bytes) -> bool:
        """Whether a page is missing somewhere."""
        return (self.folder is not None and not self.folder.contains(key)) or (
            self.outbox is not None and not self.outbox.contains(key)
        )

    def write(self, key: bytes, row: np.ndarray, used_at: float, depth: int) -> bool:
        """Keeps a page wherever it is missing; blocking, and never raises.

        Args:
            row: [bytes of the page] uint8.
            used_at, depth: see `BlockFolder.write`.

        Returns:
            Whether it was kept anywhere that it was not.
        """
        kept = self.outbox is not None and self.outbox.put(key, row.data, used_at, self.generation)
        if self.folder is not None:
            kept |= self.folder.write(key, row.data, used_at, depth) is Written.STORED
        return kept


@dataclass(frozen=True)
class Source:
    """Where the pages of a request come from: a folder, and peers that were asked."""

    folder: BlockFolder | None
    asked: Asked

    def read(
        self, keys: Sequence[bytes], rows: Sequence[np.ndarray], wanted: Callable[[], bool]
    ) -> bool:
        """Fills all rows; blocking, and never raises.

        Args:
            keys: of pages.
            rows: [bytes of the page] uint8 each; undefined after False.
            wanted: asked now and then; reading ends where it is false.
        """
        remote: dict[Peer, list[int]] = {}
        for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if not wanted():
                return False
            if self.folder is not None and self.folder.read(key, row.data):
                continue
            if (peer := self.asked.peer_of(key)) is None:
                return False
            remote.setdefault(peer, []).append(index)
        return all(
            peer.fetch([keys[i] for i in indices], [rows[i].data for i in indices], wanted)
            for peer, indices in remote.items()
        )


@dataclass(frozen=True)
class Changes:
    """Figures, and what was added to the counters since they were last taken."""

    disk: DiskStats | None  # None: there is none
    disk_before: DiskStats | None
    peers: PeeringStats | None  # None: there are none
    peers_before: PeeringStats | None
    num_dropped: int  # pages that were not written because writing is slower than computing


class PageStore(KVConnectorHandshakeMetadata):
    """The pages of one fingerprint: on disk, for peers that ask, and of peers that are asked.

    The worker makes it, and hands it to the scheduler's side by vLLM's handshake: both run in one
    process. Lookups come from the scheduler's thread. What waits for the disk runs in `writer`, one
    thread, so that it is done in the order it was asked for.
    """

    def __init__(
        self, fingerprint: Fingerprint, disk: DiskCache | None, peering: Peering | None = None
    ) -> None:
        """
        Args:
            fingerprint: of what K/V in the pool depend on.
            disk: None: pages are not kept on one.
            peering: None: there are no peers.
        """
        self._disk = disk
        self._peering = peering
        self.writer = ThreadPoolExecutor(1, "kv-store")
        self._lock = Lock()
        self._before: Changes | None = None
        self._num_dropped = self._counted = 0
        self.switch(fingerprint)

    def switch(self, fingerprint: Fingerprint) -> None:
        """From now on pages are those of another fingerprint: other weights were loaded."""
        others = {} if self._disk is None else self._disk.manifests()
        if fingerprint.digest not in others and (reason := fingerprint.why_unused(others.values())):
            logger.info("%s", reason)
        self._fingerprint = fingerprint
        self._shelves: dict[str | None, Shelf] = {}

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint that pages are kept under."""
        return self._fingerprint

    def use_pages(self, page_bytes: Sequence[int]) -> None:
        """There is a pool: bytes of a page, by KV cache group."""
        if self._peering is not None:
            self._peering.use(self._fingerprint, page_bytes)
            self._shelves = {}

    @property
    def peering(self) -> Peering | None:
        """What this engine has to do with others; None: nothing."""
        return self._peering

    @property
    def outbox(self) -> Outbox | None:
        """Pages for peers that ask; None: nobody may."""
        return None if self._peering is None else self._peering.outbox

    def shelf(self, namespace: str | None) -> Shelf:
        """Where pages of a namespace go from now on; None: they are not kept on disk."""
        if namespace not in self._shelves:
            folder = None
            if self._disk is not None and namespace is not None:
                digest, facts = self._fingerprint.digest, self._fingerprint.facts
                folder = self._disk.blocks(digest, facts, namespace)
            generation = 0 if self.outbox is None else self.outbox.generation
            self._shelves[namespace] = Shelf(folder, self.outbox, generation)
        return self._shelves[namespace]

    def source(self, place: RequestPlace) -> Source:
        """Where the pages of a request come from."""
        return Source(self.shelf(place.namespace).folder, place.asked or NOTHING)

    def takes_pages(self) -> bool:
        """Whether a page that is missing would be kept now."""
        takes = self._disk is not None and self._disk.takes_blocks()
        return takes or self.outbox is not None

    def touch(self, namespace: str | None, keys: Sequence[bytes], used_at: float) -> None:
        """Marks the pages of a text, from its first block on, as used; returns at once."""
        shelf = self.shelf(namespace)
        if shelf.folder is not None:
            self.writer.submit(shelf.folder.touch, keys, used_at)
        if shelf.outbox is not None:
            self.writer.submit(shelf.outbox.touch, keys, used_at)

    def discard(self, discard: Discard) -> None:
        """Removes pages once all that was handed to the writer before is written."""
        shelf = self.shelf(discard.namespace)

        def remove() -> None:
            if shelf.folder is not None:
                shelf.folder.discard(discard.keys)
            if shelf.outbox is not None:
                shelf.outbox.discard(discard.keys)
            discard.done.set()

        self.writer.submit(remove)

    def count_dropped(self, num_pages: int) -> None:
        """Pages that will not be written."""
        with self._lock:
            self._num_dropped += num_pages

    def take_changes(self) -> Changes | None:
        """The figures, and those of the call before; None where this process has done nothing."""
        with self._lock:
            # First: threads go on counting meanwhile.
            counted = 0 if self._disk is None else self._disk.num_counted()
            peers = None if self._peering is None else self._peering.stats()
            before = self._before
            quiet = counted == self._counted and not self._num_dropped
            if before is not None and quiet and peers == before.peers:
                return None
            changes = Changes(
                None if self._disk is None else self._disk.stats(),
                None if before is None else before.disk,
                peers,
                None if before is None else before.peers,
                self._num_dropped,
            )
            self._before = replace(changes, disk_before=None, peers_before=None)
            self._counted, self._num_dropped = counted, 0
        return changes

    def close(self) -> None:
        """Ends the threads; what the writer has not begun is not written."""
        if self._peering is not None:
            self._peering.close()
        self.writer.shutdown(wait=True, cancel_futures=True)
        if self._disk is not None:
            self._disk.close()
