# SPDX-License-Identifier: Apache-2.0
"""PeerStore: the worker's side of exchanging pages with peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from vllm_metal.identity.fingerprint import PoolContent
from vllm_metal.kv_transfer.peer.client import PeerStats
from vllm_metal.kv_transfer.peer.clients import Clients
from vllm_metal.kv_transfer.peer.export_cache import ExportCache, ExportStats
from vllm_metal.kv_transfer.peer.limits import TIMEOUTS, Timeouts
from vllm_metal.kv_transfer.peer.pulls import Patience, PullHint
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.kv_transfer.shared_pool import SharedPool
from vllm_metal.kv_transfer.store import Namespace, OfferedPages, Store
from vllm_metal.metrics.metric import Metric
from vllm_metal.settings.address import Address


@dataclass(frozen=True, kw_only=True)
class PeerMetrics(ExportStats, PeerStats):
    """Metrics of this process: of its export cache and pool, and of its peers."""

    shared_leases: int = Metric(
        "gauge",
        "vllm:kv_shared_leased_pages",
        "Pages of the KV pool that peers have leased.",
    ).field()


def _continues(wanted: Callable[[], bool], patience: Patience) -> bool:
    return wanted() and not patience.is_over


class PeerStore(Store):
    """Serves pages from the export cache, and fetches pages from peers.

    Its messages to the view name peers that went down. Namespaces are ignored, as only those who
    know a text and its salt know its hash.
    """

    def __init__(
        self,
        engine_id: str,
        listen: Address | None,
        secret: bytes,
        outbox_bytes: int,
        shares_pool: bool = False,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        """
        Args:
            listen: address to serve pages at; None: pages are not served.
            secret: shared by all engines; b"" for none.
            outbox_bytes: memory limit of the export cache.
            shares_pool: copy pages from the pool to the export cache only on request.
        """
        self._listen = listen
        self._secret = secret
        self.export_cache = ExportCache(outbox_bytes)  # 0 bytes if not served
        self._content: PoolContent | None = None  # content of the export cache's pages
        if shares_pool:
            self.shared_pool = SharedPool(self.export_cache.expect_no_more)
        self._server: PageServer | None = None  # until there is a pool
        self.clients = Clients(engine_id, secret, timeouts)
        self._down: set[Address] = set()  # peers that were down at the last message

    @property
    def handshake(self) -> Address | None:
        """Address where this engine serves pages; None if it does not."""
        if self._server is None or self._listen is None:
            return None
        return Address(self._listen.host, self._server.port)

    def use(self, content: PoolContent) -> None:
        """Sets fingerprint and sizes of all later pages; OSError if the port cannot be used."""
        # Before the terms change, or old pages would be sent under the new terms.
        self.serve(())
        self._content = content
        self.export_cache.clear()
        self.clients.use(content)
        if self._server is None and self._listen is not None:
            terms = self.clients.terms
            self._server = PageServer(
                self._listen, self._secret, self.export_cache, terms, pool=self.shared_pool
            )

    @property
    def serves_others(self) -> bool:
        return self._listen is not None

    def serve(self, pages: Sequence[OfferedPages]) -> None:
        if self._server is not None:
            self._server.pages.offered = tuple(pages)

    @property
    def _keeps_all(self) -> bool:
        return self.shared_pool is None and self.export_cache.max_bytes > 0

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        return self._keeps_all and not self.export_cache.contains(key)

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        return self._keeps_all and self._put(namespace, key, row, used_at)

    def write_shared(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float
    ) -> bool:
        assert self.shared_pool is not None
        kept = self._put(namespace, key, row, used_at)
        if kept:
            self.export_cache.count_shared(row.nbytes)
        self.shared_pool.ended([key])  # now, so that peers need not wait for the next step
        return kept

    def _put(self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float) -> bool:
        # The generation first: old pages must not enter a cache that was cleared meanwhile.
        generation = self.export_cache.generation
        if namespace.content is not self._content:
            return False
        return self.export_cache.put(key, row.data, used_at, generation)

    def read(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hint: PullHint | None,
        wanted: Callable[[], bool],
    ) -> set[int]:
        if hint is None:
            return set()
        indices_by_peer: dict[Address, list[int]] = {}
        for index, key in enumerate(keys):
            if key in hint.peers:
                indices_by_peer.setdefault(hint.peers[key], []).append(index)
        filled: set[int] = set()
        patience = hint.patience or Patience(float("inf"))
        for address, indices in indices_by_peer.items():
            pages = [keys[i] for i in indices], [rows[i].data for i in indices]
            with patience.fetching(len(indices)):
                goes_on = partial(_continues, wanted, patience)
                if self.clients.at(address).fetch(*pages, goes_on):
                    filled.update(indices)
        return filled

    def touch(self, namespace: Namespace, keys: Sequence[bytes], used_at: float) -> None:
        self.export_cache.touch(keys, used_at)

    def withdraw(self, keys: Iterable[bytes]) -> None:
        self.export_cache.discard(keys)

    def discard(self, namespace: Namespace, keys: Iterable[bytes]) -> None:
        self.withdraw(keys)

    def expect(self, keys: Iterable[bytes]) -> None:
        if self._keeps_all:
            self.export_cache.expect(keys)

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        if self._keeps_all:
            self.export_cache.expect_no_more(keys)

    def take_message(self) -> list[Address] | None:
        down = {peer.address for peer in self.clients.peers if peer.is_down}
        new, self._down = down - self._down, down
        return sorted(new, key=str) or None

    def metrics(self) -> PeerMetrics:
        fetched = vars(self.clients.stats())
        shared = 0 if self.shared_pool is None else self.shared_pool.num_leased
        return PeerMetrics(**vars(self.export_cache.stats()), **fetched, shared_leases=shared)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.clients.close()
