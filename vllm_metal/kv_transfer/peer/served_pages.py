# SPDX-License-Identifier: Apache-2.0
"""Which pages peers may have of this engine: in its outbox, its pool, and its other stores."""

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
    """An outbox, a pool behind it that fills it where pages are fetched, and pages of other stores.

    Every method is for any thread. What waits calls `sign` now and then.
    """

    #: What is in other stores, and is read there when it is fetched.
    offered: Sequence[OfferedPages] = ()

    def __init__(
        self, export_cache: ExportCache, pool: SharedPool | None, timeouts: Timeouts
    ) -> None:
        """
        Args:
            outbox: pages in memory.
            pool: where the others are; None: there are none.
            timeouts: of waits and leases.
        """
        self.export_cache = export_cache
        self._pool = pool
        self._timeouts = timeouts

    def find(
        self, holder: int, keys: Sequence[bytes], seconds: float, sign: Callable[[], bool]
    ) -> set[bytes]:
        """Finds which pages are there, and leases them.

        Args:
            holder: for whom.
            keys: of pages.
            seconds: the longest to wait for pages on their way to the outbox that are nowhere else.
            sign: called now and then; False: it is of no use to wait on.
        """
        in_pool = {key for key in keys if self._pool is not None and self._pool.contains(key)}
        others = [key for key in keys if key not in in_pool]
        stored = self._stored(others)
        self._wait([key for key in others if key not in stored], seconds, sign)
        found = in_pool | stored | {key for key in others if self.export_cache.contains(key)}
        # Before the outbox: what leaves the pool meanwhile is in the outbox, or is computed.
        if self._pool is not None:
            self._pool.lease(holder, (key for key in keys if key in in_pool), self._timeouts.lease)
        self.export_cache.lease(holder, (key for key in keys if key in found), self._timeouts.lease)
        return found

    @contextmanager
    def brought(
        self, holder: int, keys: Sequence[bytes], sign: Callable[[], bool]
    ) -> Iterator[Callable[[bytes], Page | None]]:
        """Gives what gives pages, once all that the pool has are in the outbox, or cannot come.

        A page that came for this call is kept for it until it was given, and then may give way.

        Args:
            holder, sign: see `find`.
            keys: of pages.
        """
        missing = [key for key in keys if not self.export_cache.contains(key)]
        if self._pool is not None and missing:
            self._pool.want(missing, self.export_cache.expect)
            self._wait(missing, self._timeouts.wait, sign)
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
        """Whether pages can be given, as far as is known."""
        others = [key for key in keys if not self.export_cache.contains(key)]
        return self._stored(others) == set(others)

    def _stored(self, keys: Sequence[bytes]) -> set[bytes]:
        """Pages that other stores have."""
        return set[bytes]().union(*(pages.find(keys) for pages in self.offered))

    def _read(self, key: bytes) -> Page | None:
        """A page of another store."""
        for pages in self.offered:
            if (data := pages.read(key)) is not None:
                return Page(data, checksum(key, blake3(data)))
        return None

    def _wait(self, keys: Sequence[bytes], seconds: float, sign: Callable[[], bool]) -> None:
        """Waits until none of these is being put into the outbox."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            self.export_cache.await_pages(keys, min(left, self._timeouts.waiting_sign))
            if left <= 0 or not self.export_cache.any_expected(keys) or not sign():
                return

    def renew(self, holder: int) -> None:
        """All leases of a holder go on."""
        self.export_cache.renew(holder, self._timeouts.lease)
        if self._pool is not None:
            self._pool.renew(holder, self._timeouts.lease)

    def release(self, holder: int, keys: Collection[bytes] | None) -> None:
        """Ends leases of a holder: on some pages, or None: on all."""
        self.export_cache.release(holder, keys)
        if self._pool is not None:
            self._pool.release(holder, keys)
