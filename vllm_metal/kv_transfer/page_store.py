# SPDX-License-Identifier: Apache-2.0
"""PageStore: the worker's stores as one."""

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
    from vllm_metal.patches.vllm_patches.step_result import Figures

#: Whose figures TransferStats are, beside those of each store.
TRANSFERS = "transfers"


@dataclass(frozen=True)
class TransferStats:
    """What became of pages on their way to the stores."""

    #: The metric's name is older than stores other than the disk.
    num_dropped: int = Metric(
        "total",
        "vllm:prefix_cache_disk_dropped",
        "Pages not written because the disk was slower than prefill.",
    ).field()


class PageStore:
    """The pages outside the pool, in any number of stores; threads may call what `Store` says.

    Stores are read in the order of the registry. They are written in the other one: whoever waits
    for pages stands last there. What may wait runs in `writer`, one thread, so that it is done in
    the order it was asked for.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        """
        Args:
            stores: by name, in the order that they are read in.
        """
        self.stores = stores
        self.writer = ThreadPoolExecutor(1, "kv-store")
        self.content: PoolContent | None = None  # until there is a pool
        sharing = {name: store for name, store in stores.items() if store.shared_pool is not None}
        assert len(sharing) <= 1  # of our stores one can
        self._sharing = sharing
        self._discarded: SimpleQueue[int] = SimpleQueue()
        self._figures: dict[str, Any] = {}  # last told, by store
        self._num_dropped = 0

    def use(self, content: PoolContent) -> bool:
        """There is a pool; whether its pages are others than before."""
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
        """A namespace of the weights that are loaded now; see `Namespace.name`."""
        assert self.content is not None  # there is a pool
        return Namespace(name, self.content)

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        """See `Store.wants`."""
        return any(store.wants(namespace, key) for store in self.stores.values())

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        """Keeps a page wherever it is missing; see `Store.write`."""
        stores = reversed(list(self.stores.values()))
        return any([store.write(namespace, key, row, used_at, depth) for store in stores])

    def write_shared(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float
    ) -> bool:
        """Keeps a page that `shared_pool` says is wanted."""
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
        """Fills all rows; blocking.

        Args:
            namespace, keys, rows, wanted: see `Store.read`.
            hints: by store.
        """
        left = list(range(len(keys)))
        for name, store in self.stores.items():
            if not left or not wanted():
                break
            pages = [keys[index] for index in left], [rows[index] for index in left]
            filled = store.read(namespace, *pages, hints.get(name), wanted)
            left = [index for place, index in enumerate(left) if place not in filled]
        return not left

    @property
    def shared_pool(self) -> SharedPool | None:
        """Which pages of the pool others may have, and want; None: nobody may."""
        return next((store.shared_pool for store in self._sharing.values()), None)

    def touch(self, use: Use) -> None:
        """Marks pages as used; returns at once."""
        namespace = self.namespace(use.namespace)
        for store in self.stores.values():
            self.writer.submit(store.touch, namespace, use.keys, use.at)

    def discard(self, discard: Discard) -> None:
        """Removes pages once all that was handed to the writer before is written."""
        namespace = self.namespace(discard.namespace)
        for store in self.stores.values():
            store.withdraw(discard.keys)

        def remove() -> None:
            for store in self.stores.values():
                store.discard(namespace, discard.keys)
            self._discarded.put(discard.number)

        self.writer.submit(remove)

    def expect(self, keys: Iterable[bytes]) -> None:
        """See `Store.expect`."""
        for store in self.stores.values():
            store.expect(keys)

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """See `Store.expect_no_more`."""
        for store in self.stores.values():
            store.expect_no_more(keys)

    def count_dropped(self, num_pages: int) -> None:
        """Counts pages that will not be written."""
        self._num_dropped += num_pages

    def handshake(self) -> TransferHandshake:
        """What the scheduler's side must know at its start."""
        assert self.content is not None  # there is a pool
        stores = {name: store.handshake for name, store in self.stores.items()}
        bell = None if self.shared_pool is None else self.shared_pool.bell
        return TransferHandshake(self.content, stores, bell)

    def tell(self, news: TransferUpdate) -> None:
        """Adds what the scheduler's side must hear since the last call."""
        while not self._discarded.empty():
            news.discarded.append(self._discarded.get())
        # After those: what a discard removed is among a store's news.
        told = {name: store.news() for name, store in self.stores.items()}
        news.stores |= {name: each for name, each in told.items() if each is not None}
        if self.shared_pool is not None:
            news.pins = self.shared_pool.pin_changes()

    def figures(self) -> Figures:
        """Figures that are others than at the last call, by store and of all."""
        now = {name: store.figures() for name, store in self.stores.items()}
        now[TRANSFERS] = TransferStats(self._num_dropped)
        new = {
            name: each
            for name, each in now.items()
            if each is not None and each != self._figures.get(name)
        }
        self._figures |= new
        return {name: asdict(each) for name, each in new.items()}

    def close(self) -> None:
        """Ends the threads; what the writer has not begun is not written."""
        self.writer.shutdown(wait=True, cancel_futures=True)
        for store in self.stores.values():
            store.close()
