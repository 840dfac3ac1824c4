# SPDX-License-Identifier: Apache-2.0
"""Renews a consumer's leases while somebody wants the pages, and gives them back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_metal.kv_transfer.peer.limits import MAX_KEYS, Timeouts
from vllm_metal.kv_transfer.peer.messages import Release, Renew


@dataclass
class _Wish:
    count: int  # asks that were not released
    asked_at: float  # by the clock, the last time


class LeaseManager:
    """Counts who wants which page, and tells the server from a thread of its own."""

    def __init__(
        self,
        send: Callable[[Renew | Release], None],
        timeouts: Timeouts,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            send: tells the server, as well as it can; never raises.
            timeouts: how often, and how long a page may be wanted.
            clock: seconds, for how long pages are wanted.
        """
        self._send = send
        self._timeouts = timeouts
        self._clock = clock
        self._changed = threading.Condition()
        self._wishes: dict[bytes, _Wish] = {}
        self._to_release: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, keys: Iterable[bytes]) -> None:
        """Counts wishes for pages. Call it before asking the server: no release may come after."""
        now = self._clock()
        with self._changed:
            for key in keys:
                wish = self._wishes.setdefault(key, _Wish(0, now))
                wish.count += 1
                wish.asked_at = now
                self._to_release.discard(key)

    def not_found(self, keys: Iterable[bytes]) -> None:
        """Counts wishes for pages off that the server does not have."""
        with self._changed:
            self._count_down(keys)

    def found(self) -> None:
        """There are leases to keep from now on."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="kv-peer-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def release(self, keys: Iterable[bytes]) -> None:
        """Somebody who asked does not want these any more; returns at once."""
        with self._changed:
            self._to_release.update(self._count_down(keys))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread: the server ends the leases with the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _count_down(self, keys: Iterable[bytes]) -> list[bytes]:
        """Counts wishes off; returns the pages that nobody wants any more."""
        unwanted = []
        for key in keys:
            wish = self._wishes.get(key)
            if wish is not None:
                wish.count -= 1
                if wish.count == 0:
                    del self._wishes[key]
                    unwanted.append(key)
        return unwanted

    def _run(self) -> None:
        renewed = time.monotonic()
        while True:
            with self._changed:
                while not self._closed and not self._to_release:
                    left = renewed + self._timeouts.renew - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left if self._wishes else None)
                if self._closed:
                    return
                oldest = self._clock() - self._timeouts.held
                forgotten = [key for key, wish in self._wishes.items() if wish.asked_at <= oldest]
                for key in forgotten:
                    del self._wishes[key]
                released = [*self._to_release, *forgotten]
                self._to_release.clear()
                any_left = bool(self._wishes)
            for start in range(0, len(released), MAX_KEYS):
                self._send(Release(released[start : start + MAX_KEYS]))
            if time.monotonic() >= renewed + self._timeouts.renew:
                if any_left:
                    self._send(Renew())
                renewed = time.monotonic()
