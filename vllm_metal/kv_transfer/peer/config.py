# SPDX-License-Identifier: Apache-2.0
"""PeerConfig: settings of engines that exchange pages.

The required settings follow from kv_role: a producer prefills and serves its pages, a consumer gets
pages from producers and decodes, and kv_both may do either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil
from vllm.logger import init_logger

from vllm_metal.kv_transfer.peer.limits import MAX_PEERS, SHORT_TIMEOUTS, TIMEOUTS, Timeouts
from vllm_metal.kv_transfer.peer.peer_list import read_peers
from vllm_metal.kv_transfer.store import StoreConfig
from vllm_metal.settings import secret_file, values
from vllm_metal.settings.address import Address

if TYPE_CHECKING:
    from vllm_metal.identity.fingerprint import PoolContent
    from vllm_metal.kv_transfer.peer.pulls import PullCounts
    from vllm_metal.kv_transfer.peer.store import PeerMetrics, PeerStore
    from vllm_metal.kv_transfer.peer.view import PeerView

logger = init_logger(__name__)

#: Default memory of the export cache: a 16th of the machine's, up to 32,768 tokens of an 8B model
#: with 8 heads of 16-bit K/V (131,072 bytes each).
_DEFAULTS = 16, 4 << 30
#: Default if pages come from the pool on request, and stay only until they are sent.
_DEFAULTS_SHARING = 64, 1 << 30
#: The value of 'share'.
POOL = "pool"
#: By kv_role: keys of which one is required, and unused keys.
_KEYS_OF_ROLE: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "kv_producer": (("listen",), ("peers", "peers_file", "pull")),
    "kv_consumer": (("peers", "peers_file"), ("listen",)),
    "kv_both": ((), ()),
}
_MEANINGS = {
    "listen": "the address where decoding engines ask for K/V, such as 127.0.0.1:9100",
    "peers": "the addresses that prefilling engines listen on, such as ['127.0.0.1:9100']",
}
#: When to pull a peer's pages: if that is faster than computing, whenever possible, or never.
PULLS = ("auto", "always", "never")


def _share(value: Any) -> str:
    if value != POOL:
        raise ValueError(f"must be {POOL!r}, or be left out, not {value!r}")
    return POOL


def _addresses(value: Any) -> tuple[Address, ...]:
    """Parses a list of distinct addresses; raises ValueError if it is not one."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of addresses such as ['127.0.0.1:9100'], not {value!r}")
    found = [Address.parse(each) for each in value]
    if len(set(found)) < len(found):
        raise ValueError("names an address twice")
    if len(found) > MAX_PEERS:
        raise ValueError(f"names {len(found)} addresses, but the maximum is {MAX_PEERS}")
    return tuple(found)


def _pull(value: Any) -> str:
    if value not in PULLS:
        raise ValueError(f"must be one of {', '.join(map(repr, PULLS))}, not {value!r}")
    return str(value)


@dataclass(frozen=True)
class PeerConfig(StoreConfig):
    """Addresses of this engine and its peers, and how they exchange pages."""

    name = "peers"
    enabled_by = "'listen' and 'peers', the addresses of engines that hand each other K/V"
    enabling_keys = ("listen", "peers", "peers_file")
    readers = MappingProxyType(
        {
            "listen": Address.parse,
            "peers": _addresses,
            "peers_file": values.path,
            "pull": _pull,
            "secret": values.path,
            "outbox_bytes": values.size,
            "share": _share,
        }
    )

    listen: Address | None  # address for peers; None: pages are not served
    peers: tuple[Address, ...]  # sources of pages; those of peers_file when it was read
    peers_file: Path | None  # lists peers, and may change
    pull: str  # one of PULLS
    secret: Path | None  # file with the shared secret; None: all engines are on this machine
    outbox_bytes: int  # memory limit of pages for peers
    shares_pool: bool = False  # whether peers get pages from the pool, copied on request

    @property
    def memory_bytes(self) -> int:
        return self.outbox_bytes

    @property
    def is_waited_for(self) -> bool:
        return self.listen is not None and not self.shares_pool

    @classmethod
    def check(cls, given: Mapping[str, Any], role: str, where: str, instead: str | None) -> None:
        needed, useless = _KEYS_OF_ROLE[role]
        if needed and instead is not None and not any(given.get(key) for key in needed):
            meaning = _MEANINGS[needed[0]]
            raise ValueError(
                f"kv_role {role!r} needs {where} {needed[0]!r}, {meaning}; or {instead}"
            )
        for key in useless:
            if given.get(key):
                raise ValueError(
                    f"kv_role {role!r} does not use {where} {key!r}: leave it out, or choose "
                    "kv_both"
                )
        if given.get("peers") and given.get("peers_file"):
            raise ValueError(f"{where} 'peers' and 'peers_file' both name peers: leave one out")
        if "pull" in given and not (given.get("peers") or given.get("peers_file")):
            raise ValueError(
                f"{where} 'pull' needs 'peers' or 'peers_file', the engines to pull from"
            )
        if "outbox_bytes" in given and "listen" not in given:
            raise ValueError(
                f"{where} 'outbox_bytes' needs 'listen': it bounds the K/V kept for peers to fetch"
            )
        if "share" in given and (role != "kv_both" or "listen" not in given):
            raise ValueError(
                f"{where} 'share' needs kv_role 'kv_both' and 'listen', the address at which "
                "peers fetch pages from this engine's KV pool"
            )
        if cls.is_enabled(given):
            try:
                config = cls.of(given, role)
            except ValueError as error:
                raise ValueError(f"{where} 'peers_file': {error}") from error
            _check_secret(config, where)
        elif "secret" in given:
            raise ValueError(
                f"{where} 'secret' has no effect without 'listen' or 'peers': set one of them, or "
                "leave it out"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], role: str) -> PeerConfig:
        """Returns the settings in given values; ValueError if a file of peers cannot be read."""
        most, shares_pool = given.get("outbox_bytes"), "share" in given
        if most is None:
            share, least = _DEFAULTS_SHARING if shares_pool else _DEFAULTS
            most = min(psutil.virtual_memory().total // share, least)
        listen, file = given.get("listen"), given.get("peers_file")
        peers = given.get("peers", ()) if file is None else read_peers(file)
        # A consumer leaves prefill to a producer.
        pull = given.get("pull", "always" if role == "kv_consumer" else "auto")
        return PeerConfig(
            listen,
            tuple(peers),
            file,
            pull,
            given.get("secret"),
            most if listen is not None else 0,
            shares_pool,
        )

    @property
    def _asks(self) -> bool:
        return bool(self.peers) or self.peers_file is not None

    @property
    def _timeouts(self) -> Timeouts:
        return SHORT_TIMEOUTS if self.pull == "auto" else TIMEOUTS

    def read_secret(self) -> bytes:
        """Reads the secret; b"" without one. Raises ValueError if its file cannot be used."""
        return b"" if self.secret is None else secret_file.read(self.secret, "secret")

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.peers_file is not None:
            found["peers_file"] = str(self.peers_file)
        elif self.peers:
            found["peers"] = [str(peer) for peer in self.peers]
        if self._asks:
            found["pull"] = self.pull
        if self.listen is not None:
            found |= {"listen": str(self.listen), "outbox_bytes": self.outbox_bytes}
        if self.shares_pool:
            found["share"] = POOL
        if self.secret is not None:
            found["secret"] = str(self.secret)
        return found

    @property
    def metrics_type(self) -> type[PeerMetrics]:
        from vllm_metal.kv_transfer.peer.store import PeerMetrics

        return PeerMetrics

    @property
    def view_metrics_type(self) -> type[PullCounts]:
        from vllm_metal.kv_transfer.peer.pulls import PullCounts

        return PullCounts

    def open(self, engine_id: str) -> PeerStore:
        from vllm_metal.kv_transfer.peer.store import PeerStore

        if self.listen is not None:
            most = self.outbox_bytes / 1e9
            logger.info("Serving K/V to peers at %s, keeping %.3g GB at most", self.listen, most)
        if self._asks and self.pull != "never":
            logger.info("Fetching K/V from %s", self.peers_file or ", ".join(map(str, self.peers)))
        secret = self.read_secret()
        most, shares_pool = self.outbox_bytes, self.shares_pool
        return PeerStore(engine_id, self.listen, secret, most, shares_pool, self._timeouts)

    def view(self, engine_id: str, content: PoolContent, handshake: Address | None) -> PeerView:
        from vllm_metal.kv_transfer.peer.clients import Clients
        from vllm_metal.kv_transfer.peer.peer_list import PeersFile
        from vllm_metal.kv_transfer.peer.pulls import Puller
        from vllm_metal.kv_transfer.peer.view import PeerView

        # The worker's fetches are worth waiting for; these lookups only for a short time.
        timeouts = replace(self._timeouts, no_progress=TIMEOUTS.no_progress)
        clients = Clients(engine_id, self.read_secret(), timeouts)
        clients.use(content)
        keeps = not self.shares_pool
        if self.pull == "never":
            return PeerView(engine_id, clients, (), None, None, handshake, keeps)
        file = None if self.peers_file is None else PeersFile(self.peers_file)
        peers = self.peers if file is None else file.addresses
        puller = Puller(content) if self.pull == "auto" and self._asks else None
        return PeerView(engine_id, clients, peers, file, puller, handshake, keeps)


def _check_secret(config: PeerConfig, where: str) -> None:
    """Raises ValueError if a required secret is missing, or its file cannot be used."""
    listens = () if config.listen is None else (config.listen,)
    elsewhere = [str(each) for each in (*listens, *config.peers) if not each.is_loopback]
    if elsewhere and config.secret is None:
        raise ValueError(
            f"{where} names {', '.join(elsewhere)}, beyond this machine: whoever reaches that port "
            "could read prompts out of K/V, or plant K/V that change answers. Give 'secret', a "
            "file with the same content on all machines: `openssl rand -hex 32 > FILE && chmod "
            "600 FILE`"
        )
    config.read_secret()
