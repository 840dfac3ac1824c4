# SPDX-License-Identifier: Apache-2.0
"""SharedPool: which pages the pool's blocks hold now, who has asked for them, what is to leave."""

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

#: Steps between the one that completes a block and the first that may copy it. By then the
#: scheduler has heard what became of the step, and has taken back what failed.
_RIPE_AFTER = 2


@dataclass(frozen=True)
class PinChanges:
    """Pages that others have asked for, and pages that nobody waits for any more; picklable."""

    pin: tuple[bytes, ...]
    unpin: tuple[bytes, ...]


class SharedPool:
    """Knows the pool as of the step at hand. Pages that are wanted are copied with some step.

    The scheduler says with each step what its prefix cache has gained and lost, so that others can
    be answered without it. A block that is known here is not written to before the next step.
    """

    def __init__(
        self,
        on_end: Callable[[Collection[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            on_end: told of pages that were wanted: they have left, or will not; each once.
            clock: seconds.
        """
        self.bell = WakeEvent()
        self._on_end = on_end
        self._clock = clock
        self._lock = threading.Lock()
        self._is_known = False  # what the pool holds
        self._blocks: dict[bytes, int] = {}
        self._young: dict[bytes, int] = {}  # step before which a block cannot be copied
        self._step = 0
        self._wanted: OrderedDict[bytes, None] = OrderedDict()  # the oldest first
        self._leaving: set[bytes] = set()  # wanted, and taken
        self._leases: dict[bytes, dict[int, float]] = {}  # when they end, by holder
        self._pinned: frozenset[bytes] = frozenset()  # as the scheduler was told last

    # -- for the engine's thread

    def step_begins(self, changes: CacheChanges | None) -> None:
        """A step begins on a pool that holds what the scheduler believes."""
        with self._lock:
            self._step += 1
            if changes is not None and changes.is_all:
                self._is_known = True
                self._lose(self._blocks.keys() - changes.come.keys())
                self._blocks.clear()
                self._young.clear()
            if changes is not None and self._is_known:
                self._lose(changes.gone)
                self._take_in(changes.come)
            if self._young:
                self._young = {k: end for k, end in self._young.items() if end > self._step}

    def _take_in(self, come: Mapping[bytes, int]) -> None:
        self._blocks.update(come)
        self._young.update(dict.fromkeys(come, self._step + _RIPE_AFTER))

    def _lose(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)
            self._young.pop(key, None)
            self._leases.pop(key, None)
        self._end([key for key in keys if key in self._wanted])

    def pool_goes(self) -> None:
        """There is no pool, or the scheduler does not know what it holds."""
        with self._lock:
            self._is_known = False
            self._blocks.clear()
            self._young.clear()
            self._leases.clear()
            self._end([*self._wanted, *self._leaving])
            self.bell.silence()

    @property
    def keys(self) -> list[bytes]:
        """Pages that the pool holds, as far as is known."""
        with self._lock:
            return [*self._blocks]

    def take(self, size: Callable[[bytes], int], most_bytes: int) -> dict[bytes, int]:
        """Blocks that are to be copied now, by key; `ended` follows for each.

        Args:
            size: bytes of a page, by its key.
            most_bytes: of all.
        """
        taken: dict[bytes, int] = {}
        num_bytes = 0
        with self._lock:
            for key in [key for key in self._wanted if key not in self._young]:
                num_bytes += size(key)
                if num_bytes > most_bytes:
                    break
                taken[key] = self._blocks[key]
                del self._wanted[key]
                self._leaving.add(key)
        return taken

    def pin_changes(self) -> PinChanges | None:
        """Which blocks the scheduler is to keep from now on, and which not; None: as before."""
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
        """Whether a page is wanted and has not left."""
        return bool(self._wanted or self._leaving)

    @property
    def num_leased(self) -> int:
        """Pages of the pool that are kept for somebody."""
        return len(self._leases)

    # -- for any thread

    def ended(self, keys: Iterable[bytes]) -> None:
        """Pages that were taken have left, or will not; may be called again."""
        with self._lock:
            self._end([key for key in keys if key in self._leaving])

    def _end(self, keys: Collection[bytes]) -> None:
        for key in keys:
            self._wanted.pop(key, None)
            self._leaving.discard(key)
        if keys:
            self._on_end(keys)

    def contains(self, key: bytes) -> bool:
        """Whether a block of the pool holds the page, and can be copied when it is wanted."""
        return self.bell.is_heard and key in self._blocks

    def want(self, keys: Iterable[bytes], expect: Callable[[Collection[bytes]], None]) -> None:
        """Pages are to leave the pool soon; those that are not there are left out.

        Args:
            keys: of pages.
            expect: told of those that come; `on_end` follows for each.
        """
        with self._lock:
            if not self.bell.is_heard:
                return
            new = [
                key
                for key in dict.fromkeys(keys)
                if key in self._blocks and key not in self._wanted and key not in self._leaving
            ]
            if new:
                expect(new)
                self._wanted.update(dict.fromkeys(new))
                self.bell.ring()

    def lease(self, holder: int, keys: Iterable[bytes], seconds: float) -> None:
        """Has blocks stay in the pool, as far as the scheduler can spare them; for so long."""
        with self._lock:
            found = [key for key in keys if key in self._blocks] if self.bell.is_heard else []
            ends = self._clock() + seconds
            for key in found:
                self._leases.setdefault(key, {})[holder] = ends
            if found:
                self.bell.ring()

    def renew(self, holder: int, seconds: float) -> None:
        """All leases of a holder go on for so long from now."""
        with self._lock:
            ends = self._clock() + seconds
            for leases in self._leases.values():
                if holder in leases:
                    leases[holder] = ends

    def release(self, holder: int, keys: Collection[bytes] | None) -> None:
        """Ends leases of a holder: on some pages, or None: on all."""
        with self._lock:
            found = [*self._leases] if keys is None else [k for k in keys if k in self._leases]
            released = [key for key in found if self._leases[key].pop(holder, None) is not None]
            for key in released:
                if not self._leases[key]:
                    del self._leases[key]
            if released and self._is_known:
                self.bell.ring()
