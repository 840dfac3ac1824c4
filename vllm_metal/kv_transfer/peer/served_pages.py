# SPDX-License-Identifier: Apache-2.0
"""The pages that peers may get: from the export cache, the pool, and other stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from blake3 import blake3

from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.limits import Timeouts
from vllm_metal.kv_transfer.peer.messages import Page, checksum
from vllm_metal.kv_transfer.shared_pool import SharedPool
from vllm_metal.kv_transfer.store import OfferedPages


class ServedPages:
    """Pages from an export cache, a pool that fills it on request, and other stores.

    Thread-safe. Methods that wait call `send_waiting` at intervals.
    """

    #: Pages of other stores, read when they are fetched.
    offered: Sequence[OfferedPages] = ()

    def __init__(
        self, export_cache: ExportCache, pool: SharedPool | None, timeouts: Timeouts
    ) -> None:
        """`pool`: its pages are copied to the export cache on request; None: it is not shared."""
        self.export_cache = export_cache
        self._pool = pool
        self._timeouts = timeouts

    def find(
        self, holder: int, keys: Sequence[bytes], seconds: float, send_waiting: Callable[[], bool]
    ) -> set[bytes]:
        """Returns the available pages among `keys`, and leases them.

        Args:
            seconds: limit of the wait for announced pages that are not available yet.
            send_waiting: called at intervals; returns False to stop waiting.
        """
        in_pool = {key for key in keys if self._pool is not None and self._pool.contains(key)}
        others = [key for key in keys if key not in in_pool]
        stored = self._find_offered(others)
        self._wait([key for key in others if key not in stored], seconds, send_waiting)
        found = in_pool | stored | {key for key in others if self.export_cache.contains(key)}
        # Before the export cache: a page that leaves the pool in between is in the cache, or its
        # request computes it.
        if self._pool is not None:
            self._pool.lease(holder, (key for key in keys if key in in_pool), self._timeouts.lease)
        self.export_cache.lease(holder, (key for key in keys if key in found), self._timeouts.lease)
        return found

    @contextmanager
    def export_pages(
        self, holder: int, keys: Sequence[bytes], send_waiting: Callable[[], bool]
    ) -> Iterator[Callable[[bytes], Page | None]]:
        """Copies the pool's pages to the export cache; yields a function that returns a key's page.

        A page copied for this call is leased until that function has returned it once.
        """
        missing = [key for key in keys if not self.export_cache.contains(key)]
        if self._pool is not None and missing:
            self._pool.want(missing, self.export_cache.expect)
            self._wait(missing, self._timeouts.wait, send_waiting)
            self.export_cache.lease(holder, missing, self._timeouts.lease)
        came = set(missing)

        def give(key: bytes) -> Page | None:
            page = self.export_cache.get(key)
            if page is None:
                return self._read(key)
            if key in came:
                self.export_cache.release(holder, [key])
            return page

        try:
            yield give
        finally:
            self.export_cache.release(holder, missing)

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Returns whether all pages are in the export cache or other stores, as far as known."""
        others = [key for key in keys if not self.export_cache.contains(key)]
        return self._find_offered(others) == set(others)

    def _find_offered(self, keys: Sequence[bytes]) -> set[bytes]:
        return set[bytes]().union(*(pages.find(keys) for pages in self.offered))

    def _read(self, key: bytes) -> Page | None:
        for pages in self.offered:
            if (data := pages.read(key)) is not None:
                return Page(data, checksum(key, blake3(data)))
        return None

    def _wait(
        self, keys: Sequence[bytes], seconds: float, send_waiting: Callable[[], bool]
    ) -> None:
        """Waits until none of the pages is announced."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            self.export_cache.await_pages(keys, min(left, self._timeouts.waiting_interval))
            if left <= 0 or not self.export_cache.any_expected(keys) or not send_waiting():
                return

    def renew(self, holder: int) -> None:
        """Extends all leases of a holder."""
        self.export_cache.renew(holder, self._timeouts.lease)
        if self._pool is not None:
            self._pool.renew(holder, self._timeouts.lease)

    def release(self, holder: int, keys: Collection[bytes] | None) -> None:
        """Ends a holder's leases on `keys`; all its leases if None."""
        self.export_cache.release(holder, keys)
        if self._pool is not None:
            self._pool.release(holder, keys)
