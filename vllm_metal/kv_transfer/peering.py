# SPDX-License-Identifier: Apache-2.0
"""What an engine has to do with other engines: those that ask it for pages, and those it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.kv_transfer.fingerprint import Fingerprint
from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.outbox import Outbox
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.kv_transfer.peer.terms import Terms
from vllm_metal.kv_transfer.peer_config import PeerConfig
from vllm_metal.kv_transfer.peers import Peers


@dataclass(frozen=True)
class PeeringStats:
    """Figures of this process."""

    outbox_bytes: int
    outbox_limit_bytes: int
    leased_bytes: int
    num_evicted: int  # pages of the outbox that others took the room of
    num_refused: int  # pages that the outbox had no room for
    sent_bytes: int
    fetched_bytes: int
    num_failed: int  # fetches that did not bring all pages
    num_corrupt: int  # pages whose checksum was wrong


class Peering:
    """The outbox and who serves it, and the peers that are asked."""

    def __init__(self, config: PeerConfig, engine_id: str) -> None:
        """
        Args:
            config: who listens, and who is asked.
            engine_id: of this engine.

        Raises:
            ValueError: the secret's file cannot be used.
        """
        secret = config.read_secret()
        self.engine_id = engine_id
        self._config = config
        self._secret = secret
        self._fingerprint: Fingerprint | None = None
        self._terms: Terms | None = None  # until there is a pool
        #: Pages that peers may ask for; None: nobody may.
        self.outbox = None if config.listen is None else Outbox(config.outbox_bytes)
        self._server: PageServer | None = None
        self._clients = [
            Peer(address, secret, self._settled_terms, self._difference) for address in config.peers
        ]
        #: Who is asked; None: nobody.
        self.peers = Peers(self._clients) if self._clients else None

    @property
    def address(self) -> Address | None:
        """Where peers ask; None: nobody may."""
        if self._server is None or self._config.listen is None:
            return None
        return Address(self._config.listen.host, self._server.port)

    def use(self, fingerprint: Fingerprint, page_bytes: Sequence[int]) -> None:
        """There is a pool. If its pages are others than before, peers find none of those.

        Args:
            fingerprint: of what is in the pool.
            page_bytes: of a page, by KV cache group.

        Raises:
            OSError: the address cannot be listened on.
        """
        terms = Terms(self.engine_id, fingerprint.digest, fingerprint.facts, tuple(page_bytes))
        if terms == self._terms:
            return
        if self.outbox is not None:
            self.outbox.clear()  # before the terms change, or pages would go out under the new ones
        self._fingerprint, self._terms = fingerprint, terms
        if self.outbox is not None and self._server is None and self._config.listen is not None:
            self._server = PageServer(
                self._config.listen, self._secret, self.outbox, self._settled_terms
            )

    def _settled_terms(self) -> Terms:
        assert self._terms is not None  # nobody asks or is asked before there is a pool
        return self._terms

    def _difference(self, theirs: Mapping[str, Any]) -> str:
        assert self._fingerprint is not None
        return self._fingerprint.difference(theirs)

    def stats(self) -> PeeringStats:
        """Figures; quick, and never waits."""
        outbox = None if self.outbox is None else self.outbox.stats()
        clients = [client.stats() for client in self._clients]
        return PeeringStats(
            outbox_bytes=0 if outbox is None else outbox.bytes,
            outbox_limit_bytes=self._config.outbox_bytes,
            leased_bytes=0 if outbox is None else outbox.leased_bytes,
            num_evicted=0 if outbox is None else outbox.num_evicted,
            num_refused=0 if outbox is None else outbox.num_refused,
            sent_bytes=0 if outbox is None else outbox.sent_bytes,
            fetched_bytes=sum(each.fetched_bytes for each in clients),
            num_failed=sum(each.failed_fetches for each in clients),
            num_corrupt=sum(each.bad_checksums for each in clients),
        )

    def close(self) -> None:
        """Ends the threads; peers find nobody."""
        if self._server is not None:
            self._server.close()
        if self.peers is not None:
            self.peers.close()
