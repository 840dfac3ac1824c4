# SPDX-License-Identifier: Apache-2.0
"""Other engines as a store of pages, the scheduler's side: asks who has a request's pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.kv_transfer.fingerprint import PoolContent
from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.store import Clients
from vllm_metal.kv_transfer.store import Lookup, View

#: Seconds that a request waits for its peers' answers; then it computes what nobody has offered.
#: A peer is connected to within 2 s, and may wait some seconds for pages that it is copying.
ASK_SECONDS = 10.0

Answer = Future[frozenset[bytes]]


class PeerLookup(Lookup):
    """Peers' answers to one question, which may still be coming. What they have is leased."""

    def __init__(
        self,
        answers: Mapping[int, Answer],
        let_go: Callable[[int, Answer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            answers: of each peer that was asked, by its place in the settings, best first.
            let_go: tells a peer that what it has is not needed any more; returns at once.
            clock: seconds.
        """
        self._answers = answers
        self._let_go = let_go
        self._clock = clock
        self._ends = clock() + ASK_SECONDS

    @property
    def done(self) -> bool:
        late = self._clock() >= self._ends
        return late or all(answer.done() for answer in self._answers.values())

    def contains(self, key: bytes) -> bool:
        return self._peer_of(key) is not None

    def _peer_of(self, key: bytes) -> int | None:
        """A peer that has a page, of those that have answered."""
        for number, answer in self._answers.items():
            if answer.done() and key in answer.result():
                return number
        return None

    def hint(self, keys: Sequence[bytes]) -> dict[bytes, int] | None:
        found = {key: number for key in keys if (number := self._peer_of(key)) is not None}
        return found or None

    def release(self, failed: bool) -> Lookup | None:
        """See `Lookup`. After a failure nobody is asked again: it would be waited for once more."""
        for number, answer in self._answers.items():
            self._let_go(number, answer)
        return Lookup() if failed else None


class PeerView(View):
    """Asks peers. What waits for the network runs in threads, at most four questions a peer."""

    source = CacheHitSource.P2P

    def __init__(
        self,
        engine_id: str,
        peers: Sequence[Address],
        secret: bytes,
        content: PoolContent,
        address: Address | None,
        keeps: bool = True,
    ) -> None:
        """
        Args:
            engine_id: of this engine.
            peers: whom to ask, best first.
            secret: what all share; b"": nothing.
            content: what this engine's pages are.
            address: where others ask this engine; None: nobody may.
            keeps: whether others get all pages, asked for or not.
        """
        self._engine_id = engine_id
        self._address = address
        self._keeps = keeps
        self._clients = Clients(engine_id, peers, secret)
        self._clients.use(content)
        self._threads = ThreadPoolExecutor(max(1, 4 * len(peers)), "kv-ask")

    def use(self, content: PoolContent) -> None:
        self._clients.use(content)

    def look_up(
        self,
        namespace: str | None,
        keys: Callable[[], Sequence[bytes]],
        params: Mapping[str, Any] | None,
    ) -> Lookup:
        """See `View`. The engine that a proxy had compute the prompt is asked alone, if known."""
        peers = dict(enumerate(self._clients.peers))
        engine_id = (params or {}).get("remote_engine_id")
        named = {n: peer for n, peer in peers.items() if engine_id and peer.engine_id == engine_id}
        asked = {n: peer for n, peer in (named or peers).items() if not peer.is_down}
        if not asked or not (wanted := keys()):
            return PeerLookup({}, self._let_go)
        answers = {n: self._threads.submit(peer.ask, wanted) for n, peer in asked.items()}
        return PeerLookup(answers, self._let_go)

    def _let_go(self, number: int, answer: Answer) -> None:
        answer.add_done_callback(partial(self._release, self._clients.peers[number]))

    def _release(self, peer: Peer, answer: Answer) -> None:
        with suppress(RuntimeError):  # the threads have ended: so have the peer's leases
            if not answer.cancelled() and answer.result():
                self._threads.submit(peer.release, answer.result())

    def wants(self, namespace: str | None, key: bytes) -> bool:
        return self._keeps and self._address is not None  # the worker knows which it has

    def hear(self, news: list[int]) -> None:
        for number in news:
            self._clients.peers[number].avoid()

    def params_for_others(self, req_id: str) -> dict[str, Any] | None:
        """See `View`.

        The names are those of vLLM's NIXL connector, which vLLM's proxies know. The other engine
        finds the pages by their hashes; this only says whom to ask first.
        """
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
        self._clients.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
