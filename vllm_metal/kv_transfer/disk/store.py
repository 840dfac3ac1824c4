# SPDX-License-Identifier: Apache-2.0
"""DiskStore: pages of K/V in a persistent folder that engines share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm_metal.kv_transfer.disk import layout, ledger
from vllm_metal.kv_transfer.disk.block_folder import BlockFolder, RemovedBlock
from vllm_metal.kv_transfer.disk.ledger import UNKNOWN
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.scan import FoundBlock
from vllm_metal.kv_transfer.disk.space import Space, WriteResult
from vllm_metal.kv_transfer.disk.stats import Counters, DiskStats
from vllm_metal.kv_transfer.store import Namespace, OfferedPages, Store

if TYPE_CHECKING:
    import numpy as np

    from vllm_metal.identity.fingerprint import PoolContent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskPages(OfferedPages):
    """Pages on disk that this process has listed, for a fingerprint, in all its namespaces."""

    content: PoolContent
    folders: Callable[[], Sequence[BlockFolder]]  # the current ones of all namespaces

    def find(self, keys: Iterable[bytes]) -> set[bytes]:
        folders = self.folders()
        return {key for key in keys if any(folder.listing.is_listed(key) for folder in folders)}

    def read(self, key: bytes) -> memoryview | None:
        for folder in self.folders():
            if not folder.listing.is_listed(key):
                continue
            page = memoryview(bytearray(self.content.size(key)))
            if folder.read(key, page):
                return page.toreadonly()
        return None


class DiskStore(Store):
    """A folder of pages that several engines may share. Thread-safe.

    It has a folder per fingerprint and namespace. Its messages to the view name removed pages; the
    view finds new ones on disk.
    """

    def __init__(self, root: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            root: created if missing, for its owner only. If it is not writable, pages are only
                read, with one warning.
            clock: returns seconds since the epoch.

        Raises:
            ValueError: `root` is a folder with other contents.
            OSError: it is not a folder, or cannot be created or read.
        """
        self._root = root.absolute()
        layout.make_folder(self._root, self._root)
        if not layout.may_be_cache(self._root):
            raise ValueError(
                f"{root} contains files that do not belong to a prefix cache; set "
                "prefix_cache_dir to an empty or a new folder"
            )
        self._limits = limits
        self._gone: SimpleQueue[RemovedBlock] = SimpleQueue()
        self._content: PoolContent | None = None
        self._counters = Counters()
        self._folders: dict[tuple[str, str], BlockFolder] = {}
        self._folders_lock = threading.Lock()
        self._space = Space(self._root, limits, clock, self._on_evicted)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._last_balance = UNKNOWN
        self._counted = -1  # total of counters at the last report; -1: none
        self._start_thread(self._space.start)  # only the first write waits for this scan

    def blocks(
        self, fingerprint: str, facts: Mapping[str, Any], namespace: str = "shared"
    ) -> BlockFolder:
        """Returns the blocks of a fingerprint and namespace, always the same object.

        Args:
            fingerprint: lower-case hexadecimal digest of everything that K/V depend on.
            facts: JSON values behind the digest, for the manifest.
            namespace: letters, digits, `-` and `_`; keeps its blocks apart from others.

        Raises:
            ValueError: `fingerprint` or `namespace` is invalid.
        """
        if not layout.FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is not a fingerprint, 2 to 128 characters of 0-9a-f")
        if not layout.NAMESPACE.fullmatch(namespace):
            raise ValueError(f"{namespace!r} is not a namespace of letters, digits, - and _")
        folder, is_new = self._folder(fingerprint, facts, namespace)
        if is_new:
            self._start_thread(folder.store_manifest)
            self._start_thread(lambda: folder.listing.load(self._closed.is_set))
        return folder

    def _folder(
        self, fingerprint: str, facts: Mapping[str, Any], namespace: str
    ) -> tuple[BlockFolder, bool]:
        """Returns a namespace's folder, and whether this is the first call for it."""
        with self._folders_lock:
            if (known := self._folders.get((fingerprint, namespace))) is not None:
                return known, False
            path = self._root / fingerprint / namespace
            manifest = layout.manifest_content(fingerprint, facts)
            folder = BlockFolder(path, manifest, self._space, self._counters, self._gone)
            self._folders[fingerprint, namespace] = folder
        return folder, True

    def manifests(self) -> dict[str, Mapping[str, Any]]:
        """Returns the facts of each fingerprint with a readable manifest."""
        return layout.read_manifests(self._root)

    def use(self, content: PoolContent) -> None:
        fingerprint, others = content.fingerprint, self.manifests()
        if fingerprint.digest not in others and (reason := fingerprint.why_unused(others.values())):
            logger.info("%s", reason)
        self._content = content

    def folder_of(self, namespace: Namespace) -> BlockFolder | None:
        """Returns the folder of a namespace; None: its pages are not stored."""
        if namespace.name is None:
            return None
        fingerprint = namespace.content.fingerprint
        # Without a lock, as the engine's thread asks for every page.
        if (known := self._folders.get((fingerprint.digest, namespace.name))) is not None:
            return known
        return self.blocks(fingerprint.digest, fingerprint.facts, namespace.name)

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        folder = self.folder_of(namespace)
        return folder is not None and self._space.accepts_writes() and not folder.contains(key)

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        folder = self.folder_of(namespace)
        return (
            folder is not None and folder.write(key, row.data, used_at, depth) is WriteResult.STORED
        )

    def read(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hint: Any,
        wanted: Callable[[], bool],
    ) -> set[int]:
        if (folder := self.folder_of(namespace)) is None:
            return set()
        pages = enumerate(zip(keys, rows, strict=True))
        return {i for i, (key, row) in pages if wanted() and folder.read(key, row.data)}

    def touch(self, namespace: Namespace, keys: Sequence[bytes], used_at: float) -> None:
        if (folder := self.folder_of(namespace)) is not None:
            folder.touch(keys, used_at)

    def discard(self, namespace: Namespace, keys: Iterable[bytes]) -> None:
        if (folder := self.folder_of(namespace)) is not None:
            folder.discard(keys)

    def offered(self) -> DiskPages:
        # Offers all namespaces: only those who know a page's text and salt know its hash.
        assert self._content is not None
        content, fingerprint = self._content, self._content.fingerprint

        def folders() -> list[BlockFolder]:
            with self._folders_lock:
                return [each for (of, _), each in self._folders.items() if of == fingerprint.digest]

        def list_all() -> None:
            for namespace in layout.namespaces(self._root / fingerprint.digest):
                folder, is_new = self._folder(fingerprint.digest, fingerprint.facts, namespace)
                if is_new:
                    folder.listing.load(self._closed.is_set)

        self._start_thread(list_all)
        return DiskPages(content, folders)

    def take_message(self) -> list[RemovedBlock] | None:
        return [self._gone.get() for _ in range(self._gone.qsize())] or None

    def metrics(self) -> DiskStats | None:
        counted = self._counters.total()  # first, as threads count on meanwhile
        if counted == self._counted:
            return None
        self._counted = counted
        return self.stats()

    def stats(self) -> DiskStats:
        """Returns metrics without waiting."""
        balance = ledger.read_balance(self._root)
        if balance is not None and balance.is_known:
            self._last_balance = balance  # else it is missing, or being written right now
        today = self._space.today(self._last_balance)
        number = self._counters.all()
        return DiskStats(
            bytes=today.bytes if today.is_known else 0,
            max_bytes=self._limits.max_bytes,
            written_today=today.written,
            daily_write_bytes=self._limits.daily_write_bytes,
            written_bytes=number["written_bytes"],
            read_bytes=number["read_bytes"],
            num_written=number["written"],
            num_read=number["read"],
            num_corrupt=number["corrupt"],
            num_vanished=number["vanished"],
            num_evicted=number["evicted"],
            num_refused={
                reason: number[f"refused_{reason}"]
                for reason in ("over_budget", "no_room", "failed", "paused")
            },
        )

    def close(self) -> None:
        """Waits for its threads and ends writing. Call it after the last read and write."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._space.close()

    def _on_evicted(self, block: FoundBlock) -> None:
        self._counters.add("evicted")
        name = block.name
        if (folder := self._folders.get((name.fingerprint, name.namespace))) is not None:
            folder.listing.forget(name.key)
        self._gone.put((name, False))

    def _start_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="prefix-cache-start", daemon=True)
        self._threads.append(thread)
        thread.start()
