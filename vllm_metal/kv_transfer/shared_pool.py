# SPDX-License-Identifier: Apache-2.0
"""SharedPool: pages in the pool that peers may have, their leases, and those to copy out."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.kv_transfer.wake_event import WakeEvent

if TYPE_CHECKING:
    from vllm_metal.patches.vllm_patches.cached_blocks import CacheChanges

#: Steps from a block's completion until it may be copied. By then the scheduler has processed the
#: result of the step, and has removed the blocks of failed ones.
_COPYABLE_AFTER = 2


@dataclass(frozen=True)
class PinChanges:
    """Pages that peers have leased and released since the last report; picklable."""

    pin: tuple[bytes, ...]
    unpin: tuple[bytes, ...]


class SharedPool:
    """Tracks the pool's pages and their leases; pages that peers want are copied with a later step.

    The scheduler reports cache changes with each step, so that peers can be answered between steps.
    A block listed here is not overwritten before the next step.
    """

    def __init__(
        self,
        on_end: Callable[[Collection[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_end: called once for each wanted page, after it was copied out or given up.
            clock: returns seconds.
        """
        self.wake_event = WakeEvent()
        self._on_end = on_end
        self._clock = clock
        self._lock = threading.Lock()
        self._is_known = False  # whether the scheduler has reported the pool's content
        self._blocks: dict[bytes, int] = {}
        self._copyable_from: dict[bytes, int] = {}  # first step that may copy a new block
        self._step = 0
        self._wanted: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._leaving: set[bytes] = set()  # wanted and taken
        self._leases: dict[bytes, dict[int, float]] = {}  # expiry by holder
        self._pinned: frozenset[bytes] = frozenset()  # blocks last reported to the scheduler

    # -- for the engine's thread

    def begin_step(self, changes: CacheChanges | None) -> None:
        """Applies the scheduler's cache changes as a step begins."""
        with self._lock:
            self._step += 1
            if changes is not None and changes.is_all:
                self._is_known = True
                self._remove_blocks(self._blocks.keys() - changes.added.keys())
                self._blocks.clear()
                self._copyable_from.clear()
            if changes is not None and self._is_known:
                self._remove_blocks(changes.removed)
                self._add_blocks(changes.added)
            if self._copyable_from:
                self._copyable_from = {
                    k: end for k, end in self._copyable_from.items() if end > self._step
                }

    def _add_blocks(self, added: Mapping[bytes, int]) -> None:
        self._blocks.update(added)
        self._copyable_from.update(dict.fromkeys(added, self._step + _COPYABLE_AFTER))

    def _remove_blocks(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)
            self._copyable_from.pop(key, None)
            self._leases.pop(key, None)
        self._end([key for key in keys if key in self._wanted])

    def clear(self) -> None:
        """Forgets all pages: there is no pool, or the scheduler does not know its content."""
        with self._lock:
            self._is_known = False
            self._blocks.clear()
            self._copyable_from.clear()
            self._leases.clear()
            self._end([*self._wanted, *self._leaving])
            self.wake_event.clear()

    @property
    def keys(self) -> list[bytes]:
        """Keys of the pool's cached pages."""
        with self._lock:
            return [*self._blocks]

    def take(self, size: Callable[[bytes], int], most_bytes: int) -> dict[bytes, int]:
        """Takes wanted blocks to copy now, by key, up to `most_bytes`; call `ended` for each.

        `size` returns a page's bytes by its key.
        """
        taken: dict[bytes, int] = {}
        num_bytes = 0
        with self._lock:
            for key in [key for key in self._wanted if key not in self._copyable_from]:
                num_bytes += size(key)
                if num_bytes > most_bytes:
                    break
                taken[key] = self._blocks[key]
                del self._wanted[key]
                self._leaving.add(key)
        return taken

    def pin_changes(self) -> PinChanges | None:
        """Returns blocks that the scheduler must pin and unpin; None: unchanged."""
        with self._lock:
            now = self._clock()
            for key, leases in list(self._leases.items()):
                for holder in [holder for holder, ends in leases.items() if ends <= now]:
                    del leases[holder]
                if not leases:
                    del self._leases[key]
            pinned, before = frozenset(self._leases), self._pinned
            self._pinned = pinned
        if pinned == before:
            return None
        return PinChanges(tuple(pinned - before), tuple(before - pinned))

    @property
    def is_waited_for(self) -> bool:
        """Whether a wanted page has not been copied out yet."""
        return bool(self._wanted or self._leaving)

    @property
    def num_leased(self) -> int:
        """Number of leased pages in the pool."""
        return len(self._leases)

    # -- for any thread

    def ended(self, keys: Iterable[bytes]) -> None:
        """Marks taken pages as copied or given up; idempotent."""
        with self._lock:
            self._end([key for key in keys if key in self._leaving])

    def _end(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self._wanted.pop(key, None)
            self._leaving.discard(key)
        if keys:
            self._on_end(keys)

    def contains(self, key: bytes) -> bool:
        """Returns whether the pool holds a page that can be copied on request."""
        return self.wake_event.is_connected and key in self._blocks

    def want(self, keys: Iterable[bytes], expect: Callable[[Collection[bytes]], None]) -> None:
        """Requests copies of pages; ignores those that the pool does not hold.

        `expect` is called with the pages that will be copied; `on_end` follows for each.
        """
        with self._lock:
            if not self.wake_event.is_connected:
                return
            new = [
                key
                for key in dict.fromkeys(keys)
                if key in self._blocks and key not in self._wanted and key not in self._leaving
            ]
            if new:
                expect(new)
                self._wanted.update(dict.fromkeys(new))
                self.wake_event.set()

    def lease(self, holder: int, keys: Iterable[bytes], seconds: float) -> None:
        """Asks the scheduler, best effort, to keep pages in the pool for `seconds`."""
        with self._lock:
            found = (
                [key for key in keys if key in self._blocks] if self.wake_event.is_connected else []
            )
            ends = self._clock() + seconds
            for key in found:
                self._leases.setdefault(key, {})[holder] = ends
            if found:
                self.wake_event.set()

    def renew(self, holder: int, seconds: float) -> None:
        """Extends all leases of a holder to `seconds` from now."""
        with self._lock:
            ends = self._clock() + seconds
            for leases in self._leases.values():
                if holder in leases:
                    leases[holder] = ends

    def release(self, holder: int, keys: Collection[bytes] | None) -> None:
        """Ends a holder's leases on `keys`; all its leases if None."""
        with self._lock:
            found = [*self._leases] if keys is None else [k for k in keys if k in self._leases]
            released = [key for key in found if self._leases[key].pop(holder, None) is not None]
            for key in released:
                if not self._leases[key]:
                    del self._leases[key]
            if released and self._is_known:
                self.wake_event.set()
