# SPDX-License-Identifier: Apache-2.0
"""Handshake of a connection, on both sides: version, secret, terms.

Each side proves that it knows the secret: challenge and response by HMAC-SHA256 (RFC 2104) over
both nonces, the prover's role, the session and the protocol version, so proofs cannot be replayed.
This authenticates, but does not encrypt.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_metal.kv_transfer.peer.limits import (
    MAX_FACTS_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_UNKNOWN_BYTES,
    PROTOCOL_VERSION,
)
from vllm_metal.kv_transfer.peer.messages import (
    MAGIC,
    NONCE_BYTES,
    Busy,
    Greeting,
    Offer,
    Proof,
    ProtocolError,
    Stranger,
    Welcome,
    decode,
)
from vllm_metal.kv_transfer.peer.wire import Link, PeerDown
from vllm_metal.settings.address import is_loopback_ip

_VERSION = struct.Struct("<I")
_PURPOSE = b"vllm-metal peer"
PREAMBLE = MAGIC + _VERSION.pack(PROTOCOL_VERSION)


def make_nonce() -> bytes:
    """Returns 32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Challenge:
    """Nonces and session of one handshake, which both sides' proofs cover."""

    server_nonce: bytes  # 32 bytes
    client_nonce: bytes  # 32 bytes
    session: bytes  # 16 bytes

    def proof(self, secret: bytes, role: str) -> bytes:
        """Returns the 32-byte proof of a role, "server" or "client"."""
        message = b"\0".join((_PURPOSE, role.encode(), b"%d" % PROTOCOL_VERSION, b""))
        message += self.server_nonce + self.client_nonce + self.session
        return hmac.digest(secret, message, "sha256")

    def is_proof(self, secret: bytes, role: str, proof: bytes) -> bool:
        """Returns whether `proof` is the correct proof of `role`; compares in constant time."""
        return hmac.compare_digest(self.proof(secret, role), proof)


@dataclass(frozen=True)
class Terms:
    """Describes an engine's K/V. Engines only exchange pages if their `content` is equal."""

    engine_id: str  # unique per engine start
    fingerprint: str  # digest of everything that K/V depend on except the text
    facts: Mapping[str, Any]  # JSON values behind the digest, for messages
    page_bytes: tuple[int, ...]  # size of a page, by KV cache group

    @property
    def content(self) -> tuple[str, tuple[int, ...]]:
        """Fingerprint and page sizes, which must be equal on both sides."""
        return self.fingerprint, tuple(self.page_bytes)

    @property
    def identity(self) -> tuple[str, str, tuple[int, ...]]:
        """Value that changes when the engine restarts or loads other weights."""
        return self.engine_id, *self.content


class Refused(Exception):
    """Two engines are incompatible; the text says why, without naming the other one."""


class WrongSecret(Exception):
    """The other side could not prove the secret."""


def greet(link: Link, secret: bytes, terms: Terms) -> int:
    """Performs the server's side of the handshake; returns the client's session.

    Raises:
        WrongSecret, Refused: the client is rejected.
        ProtocolError, OSError: the connection is unusable.
    """
    if not secret and not is_loopback_ip(link.peer_ip()):
        raise WrongSecret
    nonce = make_nonce()
    link.send_bytes(PREAMBLE)
    link.send(Greeting(nonce))
    if link.receive_bytes(len(PREAMBLE)) != PREAMBLE:
        raise Refused("it is no peer of this version of vllm-metal; run the same release on both")
    proof = decode(link.receive(MAX_UNKNOWN_BYTES), Proof)
    challenge = Challenge(nonce, proof.nonce, proof.session)
    if not challenge.is_proof(secret, "client", proof.proof):
        link.send(Stranger())
        raise WrongSecret
    link.send(Welcome(challenge.proof(secret, "server")))
    theirs = _terms(decode(link.receive(MAX_MESSAGE_BYTES), Offer), {})
    link.send(_offer(terms, _pack(terms.facts)))
    if theirs.content != terms.content:
        raise Refused("its terms differ")
    return int.from_bytes(proof.session, "big")


def introduce(link: Link, secret: bytes, session: bytes, terms: Terms) -> Terms:
    """Performs the client's side of the handshake; returns the server's terms.

    Those may differ from `terms`. `session`: 16 bytes, the same for all connections of this client.

    Raises:
        PeerDown: all connections of the server are in use.
        Refused: the server is no vllm-metal engine, has another version or secret, or needs one.
        ProtocolError, OSError: the connection is unusable.
    """
    if not secret and not is_loopback_ip(link.peer_ip()):
        raise Refused("it is on another machine, which requires a 'secret'")
    preamble = link.receive_bytes(len(PREAMBLE))
    if not preamble.startswith(MAGIC):
        raise Refused("the server at this address is not a vllm-metal engine")
    (version,) = _VERSION.unpack(preamble[len(MAGIC) :])
    if version != PROTOCOL_VERSION:
        raise Refused(
            f"it speaks version {version}, this engine {PROTOCOL_VERSION}: run the same release of "
            "vllm-metal on both"
        )
    greeting = decode(link.receive(MAX_UNKNOWN_BYTES), Greeting, Busy)
    if isinstance(greeting, Busy):
        raise PeerDown("all its connections are in use")
    challenge = Challenge(greeting.nonce, make_nonce(), session)
    proof = Proof(session, challenge.client_nonce, challenge.proof(secret, "client"))
    link.send_bytes(PREAMBLE)
    link.send(proof)
    answer = decode(link.receive(MAX_UNKNOWN_BYTES), Welcome, Stranger)
    if isinstance(answer, Stranger) or not challenge.is_proof(secret, "server", answer.proof):
        raise Refused("its secret differs: give both the same file as 'secret'")
    link.send(_offer(terms, b""))
    offer = decode(link.receive(MAX_MESSAGE_BYTES), Offer)
    return _terms(offer, _unpack(offer.facts))


def _offer(terms: Terms, facts: bytes) -> Offer:
    return Offer(terms.engine_id, terms.fingerprint, list(terms.page_bytes), facts)


def _terms(offer: Offer, facts: Mapping[str, Any]) -> Terms:
    return Terms(offer.engine_id, offer.fingerprint, facts, tuple(offer.page_bytes))


def _pack(facts: Mapping[str, Any]) -> bytes:
    """Encodes facts as JSON; b"" if that is too long, as they only explain the fingerprint."""
    packed = msgspec.json.encode(facts)
    return packed if len(packed) <= MAX_FACTS_BYTES else b""


def _unpack(facts: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(facts, type=dict[str, Any]) if facts else {}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ProtocolError(f"invalid configuration fingerprint: {error}") from None
