# SPDX-License-Identifier: Apache-2.0
"""PageStore combines the worker's stores into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_metal.kv_transfer.messages import Discard, TransferHandshake, TransferUpdate, Use
from vllm_metal.kv_transfer.store import Namespace, Store
from vllm_metal.metrics.metric import Metric

if TYPE_CHECKING:
    from vllm_metal.identity.fingerprint import PoolContent
    from vllm_metal.kv_transfer.shared_pool import SharedPool
    from vllm_metal.patches.vllm_patches.step_result import Metrics

#: Source name of TransferStats among the metrics of the stores.
TRANSFERS = "transfers"


@dataclass(frozen=True)
class TransferStats:
    """Counters of pages on their way to the stores."""

    #: The metric's name is older than stores other than the disk.
    num_dropped: int = Metric(
        "total",
        "vllm:prefix_cache_disk_dropped",
        "Pages not written because the disk was slower than prefill.",
    ).field()


class PageStore:
    """All stores of pages outside the pool, used like one; thread safety as for `Store`."""

    # Stores are read in the order of the registry, and written in reverse: stores that others wait
    # for come last in it. Deferrable work runs in `writer`, a single thread, to keep its order.

    def __init__(self, stores: Mapping[str, Store]) -> None:
        """`stores`: by name, in reading order."""
        self.stores = stores
        self.writer = ThreadPoolExecutor(1, "kv-store")
        self.content: PoolContent | None = None  # until there is a pool
        sharing = {name: store for name, store in stores.items() if store.shared_pool is not None}
        assert len(sharing) <= 1  # only the peer store shares the pool
        self._sharing = sharing
        self._discarded: SimpleQueue[int] = SimpleQueue()
        self._metrics: dict[str, Any] = {}  # as last reported, by store
        self._num_dropped = 0

    def use(self, content: PoolContent) -> bool:
        """Sets the fingerprint and page sizes of a new pool; returns whether they changed."""
        if content == self.content:
            return False
        self.content = content
        for store in self.stores.values():
            store.use(content)
        for serving in [store for store in self.stores.values() if store.serves_others]:
            offered = [store.offered() for store in self.stores.values() if store is not serving]
            serving.serve([pages for pages in offered if pages is not None])
        return True

    def namespace(self, name: str | None) -> Namespace:
        """Returns the namespace of this name for pages of the loaded weights."""
        assert self.content is not None  # there is a pool
        return Namespace(name, self.content)

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        """Returns whether a store misses the page and would store it now."""
        return any(store.wants(namespace, key) for store in self.stores.values())

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        """Writes a page to all stores that miss it; arguments and result as for `Store.write`."""
        stores = reversed(list(self.stores.values()))
        # A list, not a generator: every store must get the page.
        return any([store.write(namespace, key, row, used_at, depth) for store in stores])

    def write_shared(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float
    ) -> bool:
        """Stores a page that peers requested from the pool; arguments and result as for `write`."""
        stores = self._sharing.values()
        return any([store.write_shared(namespace, key, row, used_at) for store in stores])

    def read(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hints: Mapping[str, Any],
        wanted: Callable[[], bool],
    ) -> bool:
        """Fills all rows with pages, or returns False; blocking. `hints`: each store's, by name."""
        left = list(range(len(keys)))
        for name, store in self.stores.items():
            if not left or not wanted():
                break
            pages = [keys[index] for index in left], [rows[index] for index in left]
            filled = store.read(namespace, *pages, hints.get(name), wanted)
            left = [index for position, index in enumerate(left) if position not in filled]
        return not left

    @property
    def shared_pool(self) -> SharedPool | None:
        """Tracks pages of the pool that peers may get; None: peers cannot get pages of the pool."""
        return next((store.shared_pool for store in self._sharing.values()), None)

    def touch(self, use: Use) -> None:
        """Marks pages as used, in the writer's thread."""
        namespace = self.namespace(use.namespace)
        for store in self.stores.values():
            self.writer.submit(store.touch, namespace, use.keys, use.at)

    def discard(self, discard: Discard) -> None:
        """Removes pages in the writer's thread, after all writes submitted before."""
        namespace = self.namespace(discard.namespace)
        for store in self.stores.values():
            store.withdraw(discard.keys)

        def remove() -> None:
            for store in self.stores.values():
                store.discard(namespace, discard.keys)
            self._discarded.put(discard.number)

        self.writer.submit(remove)

    def expect(self, keys: Iterable[bytes]) -> None:
        """Announces that pages will be written; balance each call with `expect_no_more`."""
        for store in self.stores.values():
            store.expect(keys)

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """Notes that expected pages were written, or will not be."""
        for store in self.stores.values():
            store.expect_no_more(keys)

    def count_dropped(self, num_pages: int) -> None:
        """Counts pages that are not written."""
        self._num_dropped += num_pages

    def handshake(self) -> TransferHandshake:
        """Returns the data that the scheduler's side needs at the start."""
        assert self.content is not None  # there is a pool
        stores = {name: store.handshake for name, store in self.stores.items()}
        wake_event = None if self.shared_pool is None else self.shared_pool.wake_event
        return TransferHandshake(self.content, stores, wake_event)

    def add_messages(self, update: TransferUpdate) -> None:
        """Adds the stores' new messages for the scheduler's side to `update`."""
        while not self._discarded.empty():
            update.discarded.append(self._discarded.get())
        # After completed discards: the stores' messages then include the removed pages.
        messages = {name: store.take_message() for name, store in self.stores.items()}
        update.stores |= {name: each for name, each in messages.items() if each is not None}
        if self.shared_pool is not None:
            update.pins = self.shared_pool.pin_changes()

    def metrics(self) -> Metrics:
        """Returns metrics that changed since the last call, by store, and TransferStats."""
        now = {name: store.metrics() for name, store in self.stores.items()}
        now[TRANSFERS] = TransferStats(self._num_dropped)
        new = {
            name: each
            for name, each in now.items()
            if each is not None and each != self._metrics.get(name)
        }
        self._metrics |= new
        return {name: asdict(each) for name, each in new.items()}

    def close(self) -> None:
        """Ends the threads; drops writes that have not begun."""
        self.writer.shutdown(wait=True, cancel_futures=True)
        for store in self.stores.values():
            store.close()
