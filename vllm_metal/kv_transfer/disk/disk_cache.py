# SPDX-License-Identifier: Apache-2.0
"""DiskCache: blocks of K/V in a folder that engines share and that outlives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_metal.kv_transfer.disk import layout, ledger
from vllm_metal.kv_transfer.disk.block_folder import BlockFolder, Forgotten, Manifest
from vllm_metal.kv_transfer.disk.ledger import UNKNOWN
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.scan import FoundBlock
from vllm_metal.kv_transfer.disk.space import Space
from vllm_metal.kv_transfer.disk.stats import Counters, DiskStats


class DiskCache:
    """A folder of blocks, which several engines may use at once. Every method is for any thread."""

    def __init__(
        self,
        root: Path,
        limits: Limits,
        clock: Callable[[], float] = time.time,
        forgotten: Forgotten = lambda *_: None,
    ) -> None:
        """
        A thread scans what is there; nothing waits for it but the first write.

        Args:
            root: is made if it is not there, for its owner only. If it cannot be written, one
                warning says so, and blocks are read only.
            clock: seconds since the epoch.
            forgotten: is told of each block that this process finds gone or removes.

        Raises:
            ValueError: `root` is a folder with other things in it.
            OSError: it is no folder, or cannot be made or read.
        """
        self._root = root.absolute()
        layout.make_folder(self._root, self._root)
        if not layout.may_be_cache(self._root):
            raise ValueError(
                f"{root} holds other things than a prefix cache; name an empty folder, or one that "
                "does not exist, in prefix_cache_dir"
            )
        self._limits = limits
        self._forgotten = forgotten
        self._counters = Counters()
        self._folders: dict[tuple[str, str], BlockFolder] = {}
        self._folders_lock = threading.Lock()
        self._space = Space(self._root, limits, clock, self._counters, self._forget)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._last_balance = UNKNOWN
        self._in_thread(self._space.start)

    def blocks(
        self, fingerprint: str, facts: Mapping[str, Any], namespace: str = "shared"
    ) -> BlockFolder:
        """The blocks of a fingerprint and namespace; the same object for the same two.

        Args:
            fingerprint: lower-case hexadecimal digits, a digest of all that K/V depend on.
            facts: what it is a digest of, for people; JSON. They go into its manifest.
            namespace: letters, digits, `-` and `_`. Blocks of one are never those of another.

        Raises:
            ValueError: `fingerprint` or `namespace` is no such name.
        """
        if not layout.FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is no fingerprint: 2 to 128 of 0-9a-f")
        if not layout.NAMESPACE.fullmatch(namespace):
            raise ValueError(f"{namespace!r} is no namespace: letters, digits, - and _")
        with self._folders_lock:
            if (known := self._folders.get((fingerprint, namespace))) is not None:
                return known
            path = self._root / fingerprint
            manifest = Manifest(path / layout.MANIFEST, layout.manifest_content(fingerprint, facts))
            folder = BlockFolder(
                path / namespace, manifest, self._space, self._counters, self._forgotten
            )
            self._folders[fingerprint, namespace] = folder
        self._in_thread(folder.store_manifest)
        self._in_thread(lambda: folder.listing.load(self._closed.is_set))
        return folder

    def manifests(self) -> dict[str, Mapping[str, Any]]:
        """Facts of each fingerprint that has a manifest which can be read."""
        return layout.read_manifests(self._root)

    def num_counted(self) -> int:
        """Grows with every figure of this process that `stats` has."""
        return self._counters.total()

    def takes_blocks(self) -> bool:
        """Whether writes are worth trying: they do not pause, and the day's are not used up."""
        return self._space.takes_files()

    def stats(self) -> DiskStats:
        """Figures; quick, and never waits."""
        balance = ledger.peek(self._root)
        if balance is not None and balance.is_known:
            self._last_balance = balance  # else it is being written just now, or not there
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
        """Waits for its threads; refuses later writes. Call it after the last read and write."""
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._space.close()

    def _forget(self, block: FoundBlock) -> None:
        name = block.name
        if (folder := self._folders.get((name.fingerprint, name.namespace))) is not None:
            folder.forget(name.key)
        else:
            self._forgotten(name.fingerprint, name.namespace, name.key, False)

    def _in_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="prefix-cache-start", daemon=True)
        self._threads.append(thread)
        thread.start()
