# SPDX-License-Identifier: Apache-2.0
"""Clients: connections to this engine's peers by address."""

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
    """Peers, created on first use; thread-safe."""

    def __init__(self, engine_id: str, secret: bytes, timeouts: Timeouts = TIMEOUTS) -> None:
        """`secret`: shared by all engines; b"" for none."""
        self._engine_id = engine_id
        self._secret = secret
        self._timeouts = timeouts
        self._content: PoolContent | None = None  # None before there is a pool
        self._lock = threading.Lock()
        self._peers: dict[Address, Peer] = {}  # least recently used first
        self._gone: Counter[str] = Counter()  # counters of closed peers
        self._closed = False

    def use(self, content: PoolContent) -> None:
        """Sets the fingerprint and page sizes of this engine's K/V, which peers must share."""
        self._content = content

    def terms(self) -> Terms:
        """Returns a description of this engine's K/V, which peers must match."""
        assert self._content is not None  # peers are only used once there is a pool
        fingerprint, page_bytes = self._content.fingerprint, self._content.page_bytes
        return Terms(self._engine_id, fingerprint.digest, fingerprint.facts, page_bytes)

    def _difference(self, theirs: Mapping[str, Any]) -> str:
        assert self._content is not None
        return self._content.fingerprint.difference(theirs)

    def at(self, address: Address) -> Peer:
        """Returns the peer at an address; closes the least recently used one if there are many."""
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
            self._close_peer(oldest)
        return peer

    def retain(self, addresses: Collection[Address]) -> None:
        """Closes the peers whose address is not in `addresses`."""
        with self._lock:
            gone = [self._peers.pop(each) for each in [*self._peers] if each not in addresses]
        for peer in gone:
            self._close_peer(peer)

    def _close_peer(self, peer: Peer) -> None:
        peer.close()
        with self._lock:
            self._gone.update(vars(peer.stats()))

    @property
    def peers(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def stats(self) -> PeerStats:
        """Returns the counters of all peers, including closed ones."""
        found = [vars(peer.stats()) for peer in self.peers]  # `vars` makes no copies, every step
        names = PeerStats.__annotations__
        return PeerStats(
            **{name: self._gone[name] + sum(of[name] for of in found) for name in names}
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for peer in self.peers:
            peer.close()
