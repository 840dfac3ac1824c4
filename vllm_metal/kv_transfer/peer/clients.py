# SPDX-License-Identifier: Apache-2.0
"""Clients: the engines that this one asks, by address, and the terms that it has with them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from vllm_metal.identity.fingerprint import PoolContent
from vllm_metal.kv_transfer.peer.client import Peer, PeerStats
from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.limits import MAX_PEERS, TIMEOUTS, Timeouts
from vllm_metal.settings.address import Address


class Clients:
    """Peers that are made when they are first asked for; every method is for any thread."""

    def __init__(self, engine_id: str, secret: bytes, timeouts: Timeouts = TIMEOUTS) -> None:
        """
        Args:
            engine_id: of this engine.
            secret: what all share; b"": nothing.
            timeouts: of all peers.
        """
        self._engine_id = engine_id
        self._secret = secret
        self._timeouts = timeouts
        self._content: PoolContent | None = None  # until there is a pool
        self._lock = threading.Lock()
        self._peers: dict[Address, Peer] = {}  # the one used least recently first
        self._gone: Counter[str] = Counter()  # counts of peers that were let go
        self._closed = False

    def use(self, content: PoolContent) -> None:
        """Pages are of this content from now on."""
        self._content = content

    def terms(self) -> Terms:
        """What this engine's pages are."""
        assert self._content is not None  # nobody asks or is asked before there is a pool
        fingerprint, page_bytes = self._content.fingerprint, self._content.page_bytes
        return Terms(self._engine_id, fingerprint.digest, fingerprint.facts, page_bytes)

    def _difference(self, theirs: Mapping[str, Any]) -> str:
        assert self._content is not None
        return self._content.fingerprint.difference(theirs)

    def at(self, address: Address) -> Peer:
        """Returns the peer at an address. Of too many, the one used least recently is closed."""
        oldest = None
        with self._lock:
            peer = self._peers.pop(address, None)
            if peer is None:
                peer = Peer(
                    address, self._secret, self.terms, self._difference, timeouts=self._timeouts
                )
                if len(self._peers) >= MAX_PEERS:
                    oldest = self._peers.pop(next(iter(self._peers)))
            self._peers[address] = peer
            if self._closed:
                oldest = peer
        if oldest is not None:
            self._let_go(oldest)
        return peer

    def keep(self, addresses: Collection[Address]) -> None:
        """Closes peers at other addresses than these."""
        with self._lock:
            gone = [self._peers.pop(each) for each in [*self._peers] if each not in addresses]
        for peer in gone:
            self._let_go(peer)

    def _let_go(self, peer: Peer) -> None:
        peer.close()
        with self._lock:
            self._gone.update(vars(peer.stats()))

    @property
    def peers(self) -> list[Peer]:
        """All that are there."""
        with self._lock:
            return list(self._peers.values())

    def stats(self) -> PeerStats:
        """Counters of all peers of all time."""
        found = [vars(peer.stats()) for peer in self.peers]  # each step: no copy is made
        names = PeerStats.__annotations__
        return PeerStats(
            **{name: self._gone[name] + sum(of[name] for of in found) for name in names}
        )

    def close(self) -> None:
        """Ends all that is under way."""
        with self._lock:
            self._closed = True
        for peer in self.peers:
            peer.close()
