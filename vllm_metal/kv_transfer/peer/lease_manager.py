# SPDX-License-Identifier: Apache-2.0
"""Renews a client's leases while their pages are wanted, then releases them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_metal.kv_transfer.peer.limits import MAX_KEYS, Timeouts
from vllm_metal.kv_transfer.peer.messages import Release, Renew


@dataclass
class _Demand:
    count: int  # lookups that were not released
    asked_at: float  # time of the last lookup


class LeaseManager:
    """Counts the users of each page, and updates the server from a thread of its own."""

    def __init__(
        self,
        send: Callable[[Renew | Release], None],
        timeouts: Timeouts,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            send: sends a message to the server, best effort; never raises.
            clock: returns the time in seconds, by which leases are renewed.
        """
        self._send = send
        self._timeouts = timeouts
        self._clock = clock
        self._changed = threading.Condition()
        self._demands: dict[bytes, _Demand] = {}
        self._to_release: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, keys: Iterable[bytes]) -> None:
        """Adds a user to each page. Call it before the lookup, lest a release overtakes it."""
        now = self._clock()
        with self._changed:
            for key in keys:
                demand = self._demands.setdefault(key, _Demand(0, now))
                demand.count += 1
                demand.asked_at = now
                self._to_release.discard(key)

    def not_found(self, keys: Iterable[bytes]) -> None:
        """Removes a user from each of these pages, which the server does not have."""
        with self._changed:
            self._remove_users(keys)

    def start_renewing(self) -> None:
        """Starts to renew leases, in a thread; call it when pages were found."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="kv-peer-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def release(self, keys: Iterable[bytes]) -> None:
        """Removes a user from each page without blocking; releases pages without users."""
        with self._changed:
            self._to_release.update(self._remove_users(keys))
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread; the server ends the leases with the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _remove_users(self, keys: Iterable[bytes]) -> list[bytes]:
        """Removes users; returns the pages without any."""
        unwanted = []
        for key in keys:
            demand = self._demands.get(key)
            if demand is not None:
                demand.count -= 1
                if demand.count == 0:
                    del self._demands[key]
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
                    self._changed.wait(left if self._demands else None)
                if self._closed:
                    return
                oldest = self._clock() - self._timeouts.longest_lease
                forgotten = [
                    key for key, demand in self._demands.items() if demand.asked_at <= oldest
                ]
                for key in forgotten:
                    del self._demands[key]
                released = [*self._to_release, *forgotten]
                self._to_release.clear()
                any_left = bool(self._demands)
            for start in range(0, len(released), MAX_KEYS):
                self._send(Release(released[start : start + MAX_KEYS]))
            if time.monotonic() >= renewed + self._timeouts.renew:
                if any_left:
                    self._send(Renew())
                renewed = time.monotonic()
