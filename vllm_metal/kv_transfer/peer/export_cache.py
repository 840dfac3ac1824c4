# SPDX-License-Identifier: Apache-2.0
"""ExportCache keeps pages in memory for other engines, with leases and eviction."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from vllm_metal.kv_transfer.peer.messages import Page, checksum
from vllm_metal.metrics.metric import Metric

#: Largest part of the cache that leases may hold, so that new pages always find room.
_LEASED_SHARE = (3, 4)


@dataclass(frozen=True, kw_only=True)
class ExportStats:
    """Metrics of an export cache: its current pages and bytes, and counters over its lifetime."""

    pages: int
    sent_pages: int
    outbox_bytes: int = Metric(
        "gauge", "vllm:kv_outbox_bytes", "Bytes of pages kept for peers to fetch."
    ).field()
    outbox_limit_bytes: int = Metric(
        "gauge",
        "vllm:kv_outbox_limit_bytes",
        "Limit of the bytes kept for peers to fetch (outbox_bytes).",
    ).field()
    leased_bytes: int = Metric(
        "gauge",
        "vllm:kv_outbox_leased_bytes",
        "Bytes of pages that peers have requested and not received yet.",
    ).field()
    num_refused: int = Metric(
        "total",
        "vllm:kv_outbox_refused",
        "Pages not stored in the export cache for lack of room.",
    ).field()
    num_evicted: int = Metric(
        "total", "vllm:kv_outbox_evicted", "Pages evicted from the export cache."
    ).field()
    sent_bytes: int = Metric(
        "total", "vllm:kv_peer_sent_bytes", "Bytes of pages sent to peers."
    ).field()
    shared_pages: int = Metric(
        "total",
        "vllm:kv_shared_pages",
        "Pages copied out of the KV pool because peers requested them.",
    ).field()
    shared_bytes: int = Metric(
        "total", "vllm:kv_shared_bytes", "Bytes of pages copied out of the KV pool for peers."
    ).field()


@dataclass
class _Entry:
    page: Page
    used_at: float
    leases: dict[int, float] = field(default_factory=dict)  # expiry by holder

    @property
    def size(self) -> int:
        return self.page.data.nbytes


class ExportCache:
    """Pages by key, with LRU eviction by bytes; thread-safe.

    Reading, leasing, and the end of the last lease count as uses. A page never evicts pages of its
    own or a later text: the first pages of a text larger than the cache stay, and remain useful.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: limit for all pages together; `clock` returns seconds."""
        self.max_bytes = max_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._unleased: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._leased: dict[bytes, _Entry] = {}
        self._next_end = float("inf")  # no lease expires before
        self._copying: dict[bytes, object] = {}  # pages being put, each with a unique token
        self._bytes = 0  # bytes of all pages, including those being copied
        self._leased_bytes = 0
        self._expected: Counter[bytes] = Counter()
        self._generation = 0
        counts = ("num_refused", "num_evicted", "sent_pages", "sent_bytes")
        self._counts = Counter(dict.fromkeys((*counts, "shared_pages", "shared_bytes"), 0))

    # -- pages being produced

    def expect(self, keys: Iterable[bytes]) -> None:
        """Announces pages, so that lookups wait for them. Balance it with `expect_no_more`."""
        with self._changed:
            self._expected.update(iter(keys))

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """Notes that announced pages were put into the cache, or will not be."""
        with self._changed:
            self._expected -= Counter(iter(keys))  # drops counts that reach 0
            self._changed.notify_all()

    def await_pages(self, keys: Sequence[bytes], seconds: float) -> list[bytes]:
        """Waits `seconds` at most while a page is announced; returns the available ones."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (left := deadline - time.monotonic()) > 0 and self.any_expected(keys):
                self._changed.wait(left)
            return [key for key in keys if self.contains(key)]

    def any_expected(self, keys: Iterable[bytes]) -> bool:
        """Returns whether one of the pages is announced."""
        with self._changed:
            return bool(self._expected) and any(key in self._expected for key in keys)

    # -- available pages

    def contains(self, key: bytes) -> bool:
        with self._changed:
            return key in self._unleased or key in self._leased

    @property
    def generation(self) -> int:
        """Number of times that the cache was cleared."""
        return self._generation

    def put(
        self, key: bytes, page: memoryview, used_at: float = 0.0, generation: int | None = None
    ) -> bool:
        """Copies a page; a page that is already there stays, and counts as used.

        Args:
            used_at: when the page's text arrived; only compared with other pages' times.
            generation: the `generation` that the page belongs to; None: the current one.

        Returns:
            False if leased pages and pages of later texts leave no room, the page was
            discarded during the copy, or the cache was cleared since that generation.
        """
        size = page.nbytes
        token = object()
        with self._changed:
            if generation is not None and generation != self._generation:
                return False
            self._end_leases()
            if self._find(key) is not None or key in self._copying:
                return True
            if not self._make_room(size, used_at):
                self._counts["num_refused"] += 1
                return False
            self._bytes += size  # before the copy, so that the limit holds meanwhile
            self._copying[key] = token
        entry = None
        try:
            data = memoryview(bytes(page))
            entry = _Entry(Page(data, checksum(key, blake3(data))), used_at)
        finally:
            with self._changed:
                wanted = self._copying.get(key) is token  # else it was discarded meanwhile
                if wanted:
                    del self._copying[key]
                if entry is not None and wanted:
                    self._unleased[key] = entry
                else:
                    self._bytes -= size
        return wanted

    def get(self, key: bytes) -> Page | None:
        """Returns a page, which stays readable when evicted; None if it is missing."""
        with self._changed:
            self._end_leases()
            entry = self._find(key)
            return entry.page if entry is not None else None

    def touch(self, keys: Iterable[bytes], used_at: float) -> None:
        """Marks pages as used by a text that arrived at `used_at`."""
        with self._changed:
            for key in keys:
                if (entry := self._find(key)) is not None:
                    entry.used_at = max(entry.used_at, used_at)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Removes pages, leased or not; transfers in progress continue."""
        with self._changed:
            for key in keys:
                self._remove(key)
                self._copying.pop(key, None)

    def clear(self) -> None:
        """Removes all pages, leases and announcements."""
        with self._changed:
            for key in [*self._unleased, *self._leased]:
                self._remove(key)
            self._copying.clear()
            self._expected.clear()
            self._generation += 1
            self._changed.notify_all()

    def _find(self, key: bytes) -> _Entry | None:
        entry = self._unleased.get(key)
        if entry is not None:
            self._unleased.move_to_end(key)
            return entry
        return self._leased.get(key)

    def _make_room(self, size: int, used_at: float) -> bool:
        if size > self.max_bytes - self._leased_bytes:
            return False
        while self._bytes + size > self.max_bytes and self._unleased:
            if next(iter(self._unleased.values())).used_at >= used_at > 0.0:
                return False
            _, evicted = self._unleased.popitem(last=False)
            self._bytes -= evicted.size
            self._counts["num_evicted"] += 1
        return self._bytes + size <= self.max_bytes  # False if pages being copied take the room

    def _remove(self, key: bytes) -> None:
        entry = self._unleased.pop(key, None)
        if entry is None:
            entry = self._leased.pop(key, None)
            if entry is None:
                return
            self._leased_bytes -= entry.size
        self._bytes -= entry.size

    # -- leases

    def lease(self, holder: int, keys: Iterable[bytes], seconds: float) -> int:
        """Protects pages from eviction for `seconds`; returns the number of leased pages.

        Ignores missing pages, and those that would make leases exceed their share of the memory.
        """
        most = self.max_bytes * _LEASED_SHARE[0] // _LEASED_SHARE[1]
        num_leased = 0
        with self._changed:
            self._end_leases()
            ends = self._clock() + seconds
            for key in keys:
                entry = self._find(key)
                if entry is None:
                    continue
                if key in self._unleased:
                    if self._leased_bytes + entry.size > most:
                        continue
                    self._leased[key] = self._unleased.pop(key)
                    self._leased_bytes += entry.size
                entry.leases[holder] = max(ends, entry.leases.get(holder, ends))
                num_leased += 1
            self._next_end = min(self._next_end, ends)
        return num_leased

    def renew(self, holder: int, seconds: float) -> None:
        """Extends all active leases of a holder to at least `seconds` from now."""
        with self._changed:
            self._end_leases()
            ends = self._clock() + seconds
            for entry in self._leased.values():
                if holder in entry.leases:
                    entry.leases[holder] = max(ends, entry.leases[holder])

    def release(self, holder: int, keys: Collection[bytes] | None) -> None:
        """Ends a holder's leases on `keys`; all its leases if None."""
        with self._changed:
            self._end_leases()
            for key in [*self._leased] if keys is None else keys:
                if key in self._leased and holder in self._leased[key].leases:
                    self._end_lease(holder, key)

    def _end_leases(self) -> None:
        now = self._clock()
        if now < self._next_end:
            return
        over = [
            (ends, holder, key)
            for key, entry in self._leased.items()
            for holder, ends in entry.leases.items()
            if ends <= now
        ]
        # In the order of expiry, which is then the order of eviction.
        for _, holder, key in sorted(over, key=lambda each: each[0]):
            self._end_lease(holder, key)
        self._next_end = min(
            (ends for entry in self._leased.values() for ends in entry.leases.values()),
            default=float("inf"),
        )

    def _end_lease(self, holder: int, key: bytes) -> None:
        entry = self._leased[key]
        del entry.leases[holder]
        if not entry.leases:
            self._unleased[key] = self._leased.pop(key)
            self._leased_bytes -= entry.size

    # -- metrics

    def count_sent(self, num_bytes: int) -> None:
        with self._changed:
            self._counts.update(sent_pages=1, sent_bytes=num_bytes)

    def count_shared(self, num_bytes: int) -> None:
        with self._changed:
            self._counts.update(shared_pages=1, shared_bytes=num_bytes)

    def stats(self) -> ExportStats:
        with self._changed:
            self._end_leases()
            return ExportStats(
                pages=len(self._unleased) + len(self._leased),
                outbox_bytes=self._bytes,
                outbox_limit_bytes=self.max_bytes,
                leased_bytes=self._leased_bytes,
                **self._counts,
            )
