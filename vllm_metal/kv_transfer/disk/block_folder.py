# SPDX-License-Identifier: Apache-2.0
"""BlockFolder holds the blocks of one fingerprint and namespace, by key."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from vllm_metal.kv_transfer.disk import block_file, eviction, layout
from vllm_metal.kv_transfer.disk.block_file import BlockFile
from vllm_metal.kv_transfer.disk.layout import BlockName
from vllm_metal.kv_transfer.disk.space import Space, WriteResult, is_transient
from vllm_metal.kv_transfer.disk.stats import Counters

logger = logging.getLogger(__name__)

#: A block that is no longer available, and whether a bad file that cannot be removed stays in its
#: place.
RemovedBlock = tuple[BlockName, bool]


class Listing:
    """The blocks known to be in a folder; asks the file system for unknown keys. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Set operations on a single bytes key are atomic, so no lock is needed.
        self._known: set[bytes] = set()
        # Held from the look at the disk until the key is added. A removal in between then comes
        # after the addition, and the key does not stay for good.
        self._listing_lock = threading.Lock()
        self._bad: set[bytes] = set()  # bad files that cannot be removed

    def contains(self, key: bytes) -> bool:
        """Returns whether the block is on disk. Another engine may evict it before it is read."""
        if key in self._known:
            return True
        if key in self._bad:
            return False
        with self._listing_lock:
            # Another engine may have written it.
            if not os.path.lexists(layout.block_path(self._path, key)):
                return False
            self._known.add(key)
        return True

    def is_listed(self, key: bytes) -> bool:
        """Returns whether a block is listed as on disk, without checking the disk."""
        return key in self._known

    def is_bad(self, key: bytes) -> bool:
        """Returns whether the block's file is bad and could not be removed."""
        return key in self._bad

    def add(self, key: bytes) -> None:
        self._bad.discard(key)
        self._known.add(key)

    def forget(self, key: bytes, stays: bool = False) -> None:
        """Notes that a block's file is gone, or, with `stays`, bad and not removable."""
        if stays:
            self._bad.add(key)
        with self._listing_lock:
            self._known.discard(key)

    def load(self, stopped: Callable[[], bool]) -> None:
        """Adds all blocks on disk to the listing, until `stopped` returns True; may take long."""
        with suppress(OSError):
            for shard in os.listdir(self._path):
                if stopped():
                    return
                with suppress(OSError), self._listing_lock:
                    found = map(layout.block_key, os.listdir(self._path / shard))
                    self._known.update(key for key in found if key is not None)


class BlockFolder:
    """The blocks of one fingerprint and namespace, by key (a hash of 1 to 64 bytes).

    Thread-safe; no method raises, and all but `contains` block. Made by `DiskStore.blocks`.
    """

    def __init__(
        self,
        path: Path,
        manifest: bytes,
        space: Space,
        counters: Counters,
        gone: SimpleQueue[RemovedBlock],
    ) -> None:
        """
        Args:
            path: folder of the namespace.
            manifest: contents of the fingerprint's manifest file.
            gone: receives each block that is no longer available.
        """
        self._path = path
        self._name = "/".join(path.parts[-2:])
        self._manifest = manifest
        self._space = space
        self._counters = counters
        self._gone = gone
        self.listing = Listing(path)
        self._in_flight: set[bytes] = set()  # keys of blocks that threads are writing
        self._in_flight_ends = threading.Condition()

    def contains(self, key: bytes) -> bool:
        """Returns whether the block is on disk. Another engine may evict it before it is read."""
        return self.listing.contains(key)

    def read(self, key: bytes, page: memoryview) -> bool:
        """Reads a block into writable, contiguous `page`; False, with `page` undefined, for a miss.

        Removes a file that is not exactly this block.
        """
        try:
            page = page.cast("B")
            block = BlockFile(self._name, key, page.nbytes)
            if self.listing.is_bad(key) or not self._read(block, page):
                return False
        except Exception:
            logger.exception("A block could not be read")
            return False
        self._counters.add("read")
        self._counters.add("read_bytes", block.size)
        return True

    def write(self, key: bytes, page: memoryview, used_at: float, depth: int) -> WriteResult:
        """Stores a block, once: a second thread with the same block waits for the first.

        Args:
            page: contiguous, unchanged during the call.
            used_at: time of the last use, seconds since the epoch.
            depth: number of blocks before it in its prompt.
        """
        try:
            page = page.cast("B")
            block = BlockFile(self._name, key, page.nbytes)
            with self._only_writer(key):
                if self.contains(key):
                    return WriteResult.PRESENT
                return self._write(block, page, _mtime_ns(used_at, depth))
        except Exception:
            logger.exception("A block could not be written")
            self._counters.add("refused_failed")
            return WriteResult.FAILED

    def touch(self, keys: Sequence[bytes], used_at: float, first_depth: int = 0) -> None:
        """Marks consecutive blocks of a prompt, the first at `first_depth`, as used."""
        for depth, key in enumerate(keys, first_depth):
            try:
                mtime_ns = _mtime_ns(used_at, depth)
                os.utime(layout.block_path(self._path, key), ns=(mtime_ns, mtime_ns))
            except FileNotFoundError:
                self.forget(key)
            except (OSError, ValueError, OverflowError):
                return  # a read-only disk: eviction order is all that is lost

    def discard(self, keys: Iterable[bytes]) -> None:
        """Removes blocks and their files."""
        for key in keys:
            self._remove(key)

    def forget(self, key: bytes, stays: bool = False) -> None:
        """Notes and reports that a block's file is gone, or is bad and cannot be removed."""
        self.listing.forget(key, stays)
        fingerprint, namespace = self._path.parts[-2:]
        self._gone.put((BlockName(fingerprint, namespace, key), stays))

    def store_manifest(self) -> None:
        """Writes the manifest unless it exists."""
        path, content = self._path.parent / layout.MANIFEST, self._manifest
        if not path.exists():
            self._space.store(
                path, len(content), lambda descriptor: _write_all(descriptor, content)
            )

    def _read(self, block: BlockFile, page: memoryview) -> bool:
        path = layout.block_path(self._path, block.key)
        identity = None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # Another engine may replace the file; only this one may be removed as bad.
                identity = eviction.identity_of(os.fstat(descriptor))
                good = block_file.read(descriptor, block, page)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            if self.listing.is_listed(block.key):
                self._counters.add("vanished")
            self.forget(block.key)
            return False
        except OSError as error:
            if is_transient(error):
                return False
            good = False
        if not good:
            self._counters.add("corrupt")
            self._remove(block.key, identity)
        return good

    def _remove(self, key: bytes, identity: tuple[int, int] | None = None) -> None:
        gone = self._space.remove(layout.block_path(self._path, key), identity)
        self.forget(key, stays=not gone)

    def _write(self, block: BlockFile, page: memoryview, mtime_ns: int) -> WriteResult:
        paused = self._space.is_paused()
        self.store_manifest()
        outcome = self._space.store(
            layout.block_path(self._path, block.key),
            block.size,
            lambda descriptor: block_file.write(descriptor, block, page),
            mtime_ns,
        )
        if outcome is WriteResult.STORED:
            self._counters.add("written")
            self._counters.add("written_bytes", block.size)
        if outcome in (WriteResult.STORED, WriteResult.PRESENT):
            self.listing.add(block.key)
        else:
            self._counters.add(f"refused_{'paused' if paused else outcome.value}")
        return outcome

    @contextmanager
    def _only_writer(self, key: bytes) -> Iterator[None]:
        with self._in_flight_ends:
            self._in_flight_ends.wait_for(lambda: key not in self._in_flight)
            self._in_flight.add(key)
        try:
            yield
        finally:
            with self._in_flight_ends:
                self._in_flight.remove(key)
                self._in_flight_ends.notify_all()


def _mtime_ns(used_at: float, depth: int) -> int:
    # Blocks used at the same time are evicted deepest first, as they are useless without those
    # before them. Truncated to microseconds, since a float has no nanoseconds here.
    return int(used_at * 1e6) * 1000 - depth * 1000


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
