# SPDX-License-Identifier: Apache-2.0
"""What goes to the worker with a load of peers' pages: where they are, and how long it may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_metal.kv_transfer.peer.address import Address

#: Seconds that a pull may be behind what computing would have done by then.
SLACK_S = 1.2


class Patience:
    """How long one load waits for peers: until it is `SLACK_S` seconds behind computing.

    A request keeps the first pages that came, and computes the rest, so it is late by that much at
    most. Only the time in which something is fetched counts: the engine's own limits are its own.
    """

    def __init__(
        self, page_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            page_seconds: that computing takes in place of a page; 0 where a load that fails leaves
                nothing; None: not known, and then each fetch may take so long.
            clock: seconds.
        """
        self.page_seconds = page_seconds
        self._start(clock)

    def _start(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reading = 0  # fetches
        self._num_pages = 0  # that came, or are being fetched
        self._spent = 0.0  # seconds, until `_since`
        self._since = 0.0

    def __reduce__(self) -> tuple[type[Patience], tuple[float | None]]:
        return Patience, (self.page_seconds,)

    @contextmanager
    def fetching(self, num_pages: int) -> Iterator[None]:
        """Stands around a fetch of so many pages; any thread's."""
        with self._lock:
            self._count()
            self._num_reading += 1
            self._num_pages += num_pages
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._num_reading -= 1
                if self.page_seconds is None:
                    self._spent = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it is time to compute what has not come."""
        with self._lock:
            self._count()
            return self._spent > SLACK_S + (self.page_seconds or 0.0) * self._num_pages

    def _count(self) -> None:
        now = self._clock()
        if self._num_reading:
            self._spent += now - self._since
        self._since = now


@dataclass(frozen=True)
class PullHint:
    """Which peer has a page, and how long a request waits for all of them."""

    places: Mapping[bytes, Address]  # by key
    patience: Patience | None = None  # None: as long as something moves
