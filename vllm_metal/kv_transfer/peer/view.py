# SPDX-License-Identifier: Apache-2.0
"""PeerView: the scheduler's side of exchanging pages, which looks up a request's pages at peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.identity.fingerprint import PoolContent
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.clients import Clients
from vllm_metal.kv_transfer.peer.limits import MAX_PEERS
from vllm_metal.kv_transfer.peer.peer_list import PeerList, PeersFile
from vllm_metal.kv_transfer.peer.pulls import Pull, PullCounts, Puller, PullHint
from vllm_metal.kv_transfer.store import Lookup, View
from vllm_metal.settings.address import Address

#: Seconds that a request waits for its peers; then it computes what none has offered. Connecting
#: takes at most 2 s, and a peer may wait some seconds for pages that it is copying.
LOOKUP_SECONDS = 10.0
#: The same if the request could compute everything: a peer answers in milliseconds.
SHORT_LOOKUP_SECONDS = 0.3
#: Threads that wait for answers: four lookups per peer, as long as few peers hang.
_MOST_THREADS = 64
PendingLookup = Future[frozenset[bytes]]


class PeerLookup(Lookup):
    """Peers' answers to one lookup, perhaps pending. Found pages are leased."""

    def __init__(
        self,
        answers: Mapping[Address, PendingLookup],
        release_answer: Callable[[Address, PendingLookup], None],
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LOOKUP_SECONDS,
    ) -> None:
        """
        Args:
            answers: peers' answers, best first.
            release_answer: releases a peer's pages without blocking.
            clock: returns seconds.
            seconds: limit of the wait for answers.
        """
        self._answers = answers
        self._release_answer = release_answer
        self._clock = clock
        self._ends = clock() + seconds

    @property
    def done(self) -> bool:
        late = self._clock() >= self._ends
        return late or all(answer.done() for answer in self._answers.values())

    def contains(self, key: bytes) -> bool:
        return self._peer_of(key) is not None

    def _peer_of(self, key: bytes) -> Address | None:
        for address, there in self.found().items():
            if key in there:
                return address
        return None

    def found(self) -> dict[Address, frozenset[bytes]]:
        """Returns, by peer, the pages that it has, for peers that have answered."""
        answered = {at: each for at, each in self._answers.items() if each.done()}
        return {at: each.result() for at, each in answered.items() if not each.cancelled()}

    def hint(self, keys: Sequence[bytes]) -> PullHint | None:
        found = {key: at for key in keys if (at := self._peer_of(key)) is not None}
        return PullHint(found) if found else None

    def release(self, failed: bool) -> Lookup | None:
        """Releases found pages. After a failure no peer is asked again, to avoid another wait."""
        for address, answer in self._answers.items():
            self._release_answer(address, answer)
        return Lookup() if failed else None


class ChosenLookup(PeerLookup):
    """Lookup that uses one peer's pages if pulling them is faster than computing, or none."""

    def __init__(
        self,
        puller: Puller,
        keys: Sequence[bytes],
        answers: Mapping[Address, PendingLookup],
        release_answer: Callable[[Address, PendingLookup], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            puller: chooses the peer once, from the answers that came in time.
            keys: pages that were looked up.
            answers, release_answer, clock: see `PeerLookup`.
        """
        super().__init__(answers, release_answer, clock, SHORT_LOOKUP_SECONDS)
        self._puller = puller
        self._keys = keys
        self._is_chosen = False
        self._pull: Pull | None = None

    @property
    def done(self) -> bool:
        if not self._is_chosen and super().done:
            self._is_chosen = True
            self._pull = self._puller.decide(self._keys, self.found(), self._clock())
        return self._is_chosen

    def contains(self, key: bytes) -> bool:
        return self._pull is not None and key in self._pull.keys

    def hint(self, keys: Sequence[bytes]) -> PullHint | None:
        if self._pull is None:
            return None
        return self._puller.begin(self._pull, keys, self._clock())

    def loaded(self) -> None:
        if self._pull is not None:
            self._puller.end(self._pull, failed=False, now=self._clock())

    def release(self, failed: bool) -> Lookup | None:
        if self._pull is not None and failed:
            self._puller.end(self._pull, failed=True, now=self._clock())
        elif self._pull is not None:
            self._puller.give_up(self._pull)
        return super().release(failed)


class PeerView(View):
    """Scheduler's view of pages at peers; looks them up in threads."""

    source = CacheHitSource.P2P

    def __init__(
        self,
        engine_id: str,
        clients: Clients,
        peers: Sequence[Address],
        file: PeersFile | None,
        puller: Puller | None,
        address: Address | None,
        keeps: bool = True,
    ) -> None:
        """
        Args:
            clients: makes the peers; closed with the view.
            peers: initial peers, best first.
            file: lists peers, and may change; None: they are fixed.
            puller: decides which pages to pull; None: all that peers have.
            address: where this engine serves pages; None if it does not.
            keeps: copy all pages to the export cache, not only those that peers request.
        """
        self._engine_id = engine_id
        self._clients = clients
        self._puller = puller
        self._address = address
        self._keeps = keeps
        # Last short lookup of each peer.
        self._asked: dict[Address, tuple[PendingLookup, float]] = {}
        most = min(_MOST_THREADS, 4 * (MAX_PEERS if file is not None else len(peers)))
        self._threads = ThreadPoolExecutor(max(1, most), "kv-lookup")
        self._list = PeerList(clients, peers, file, address, greets=puller is not None)

    def use(self, content: PoolContent) -> None:
        self._clients.use(content)
        if self._puller is not None:
            self._puller.use(content)

    def look_up(
        self,
        namespace: str | None,
        keys: Callable[[], Sequence[bytes]],
        params: Mapping[str, Any] | None,
    ) -> Lookup:
        """Asks peers for pages; only the engine that prefilled, if a proxy's `params` name it."""
        # Such a request waits for pages that this engine is still producing.
        peers = {at: self._clients.at(at) for at in self._list.addresses}
        engine_id = (params or {}).get("remote_engine_id")
        named = {
            at: peer for at, peer in peers.items() if engine_id and peer.engine_id == engine_id
        }
        if self._puller is not None and not engine_id:
            return self._look_up_briefly(self._puller, peers, keys)
        asked = {at: peer for at, peer in (named or peers).items() if not peer.is_down}
        if not asked or not (wanted := keys()):
            return PeerLookup({}, self._release_answer)
        answers = {at: self._threads.submit(peer.lookup, wanted) for at, peer in asked.items()}
        return PeerLookup(answers, self._release_answer)

    def _look_up_briefly(
        self, puller: Puller, peers: Mapping[Address, Peer], keys: Callable[[], Sequence[bytes]]
    ) -> Lookup:
        """Asks peers that are known to answer, without waiting for pages being produced."""
        now = time.monotonic()
        puller.retain(peers)
        late = {
            at
            for at, (answer, asked_at) in self._asked.items()
            if not answer.done() and now - asked_at > SHORT_LOOKUP_SECONDS
        }
        asked = {
            at: peer
            for at, peer in peers.items()
            if at not in late and not peer.is_failing and puller.is_usable(at, now)
        }
        if not asked or not (wanted := keys()):
            return PeerLookup({}, self._release_answer)
        answers = {
            at: self._threads.submit(partial(peer.lookup, wait_s=0.0), wanted)
            for at, peer in asked.items()
        }
        before = {at: each for at, each in self._asked.items() if at in peers}
        self._asked = before | {at: (answer, now) for at, answer in answers.items()}
        return ChosenLookup(puller, wanted, answers, self._release_answer)

    def _release_answer(self, address: Address, answer: PendingLookup) -> None:
        if address in self._list.addresses:  # else its leases ended with its connections
            answer.add_done_callback(partial(self._release, self._clients.at(address)))

    def _release(self, peer: Peer, answer: PendingLookup) -> None:
        with suppress(RuntimeError):  # if the threads have ended, so have the peer's leases
            if not answer.cancelled() and answer.result():
                self._threads.submit(peer.release, answer.result())

    def wants(self, namespace: str | None, key: bytes) -> bool:
        return self._keeps and self._address is not None  # the worker knows what it has

    def update(self, message: list[Address]) -> None:
        for address in message:
            if address in self._list.addresses:
                self._clients.at(address).avoid()

    def computed(self, prefill_rows: int, prefill_seconds: float) -> None:
        if self._puller is not None:
            self._puller.computed(prefill_rows, prefill_seconds)

    def metrics(self) -> PullCounts | None:
        return None if self._puller is None else self._puller.counts

    def kv_transfer_params(self, req_id: str) -> dict[str, Any] | None:
        """Returns kv_transfer_params with the names of vLLM's NIXL connector, for its proxies."""
        # The other engine finds pages by their hashes; this only names the first peer to ask.
        if self._address is None:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_block_ids": [],
            "remote_request_id": req_id,
            "remote_host": self._address.host,
            "remote_port": self._address.port,
            "tp_size": 1,
        }

    def close(self) -> None:
        self._list.close()
        self._clients.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
