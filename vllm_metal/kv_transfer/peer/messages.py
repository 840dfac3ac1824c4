# SPDX-License-Identifier: Apache-2.0
"""What two engines say to each other: msgpack of msgspec's structs, checked as they are decoded.

Both send `MAGIC` and the version of the protocol first. Then the server sends `Greeting`, the
client `Proof`, the server `Welcome`, the client its `Offer`, the server its own. From then on the
client asks and the server answers, one at a time; raw bytes of a page follow each `Row`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, Union, overload

import msgspec
from blake3 import blake3
from msgspec import Meta

from vllm_metal.kv_transfer.peer.limits import (
    MAX_FACTS_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
)

MAGIC = b"VMKVPEER"
CHECKSUM_BYTES = 16
NONCE_BYTES = 32  # as many as SHA-256 gives: none is drawn twice
PROOF_BYTES = 32  # of SHA-256
SESSION_BYTES = 16

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
ProofBytes = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Session = Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Name = Annotated[str, Meta(max_length=256)]
PageBytes = Annotated[int, Meta(ge=0, lt=1 << 40)]


@dataclass(frozen=True)
class Page:
    """Bytes of a block of one KV cache group. They stay as they are while somebody holds them."""

    data: memoryview  # read-only bytes
    checksum: bytes  # 16 bytes, of key and data


def checksum(key: bytes, hashed: blake3) -> bytes:
    """The first 16 bytes of the BLAKE3 of a page's bytes, which `hashed` has, and then of its key.

    The key comes last: BLAKE3 is three times as fast on aligned parts.
    """
    return hashed.update(key).digest(length=CHECKSUM_BYTES)


class ProtocolError(Exception):
    """The other side says what the protocol does not have. Its connection is closed."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Any of them."""


class Greeting(Message, frozen=True):
    """Server: prove that you know the secret."""

    nonce: Nonce


class Busy(Message, frozen=True):
    """Server: it has as many connections as it takes, and closes this one."""


class Proof(Message, frozen=True):
    """Client: here is the proof; now prove it, too."""

    session: Session  # the same of all connections of one client, and nobody else's
    nonce: Nonce
    proof: ProofBytes


class Welcome(Message, frozen=True):
    """Server: the proof is right, and this is its own."""

    proof: ProofBytes


class Stranger(Message, frozen=True):
    """Server: the proof is wrong; it closes the connection."""


class Offer(Message, frozen=True):
    """Both: an engine's terms. A server of others closes the connection after its own."""

    engine_id: Name
    fingerprint: Name
    page_bytes: Annotated[list[PageBytes], Meta(max_length=256)]
    #: JSON, empty from a client. Decoded by who wants to name a difference.
    facts: Annotated[bytes, Meta(max_length=MAX_FACTS_BYTES)]


class Ask(Message, frozen=True):
    """Client: which of the pages are there? They are leased to its session."""

    keys: Keys
    wait_ms: Annotated[int, Meta(ge=0)]  # for pages that are being made; the server has a limit


class Waiting(Message, frozen=True):
    """Server: pages are being made, or copied; the answer comes later."""


class Found(Message, frozen=True):
    """Server: whether each is there."""

    there: Annotated[list[bool], Meta(max_length=MAX_KEYS)]


class Fetch(Message, frozen=True):
    """Client: send the pages, in this order. Signs of waiting may come before the first."""

    keys: Keys


class Row(Message, frozen=True):
    """Server: one of the pages; `size` raw bytes follow."""

    size: PageBytes
    checksum: Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]


class NoPage(Message, frozen=True):
    """Server: the next page is not there, and no more of them follow."""


class Renew(Message, frozen=True):
    """Client: it still wants the pages that are leased to its session."""


class Release(Message, frozen=True):
    """Client: it does not want these any more."""

    keys: Keys


class Done(Message, frozen=True):
    """Server: so it is."""


M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)

_DECODERS: dict[tuple[type[Message], ...], msgspec.msgpack.Decoder] = {}


def encode(message: Message) -> bytes:
    """As it is sent, without its length."""
    return msgspec.msgpack.encode(message)


@overload
def decode(body: bytes | bytearray, expected: type[M], /) -> M: ...
@overload
def decode(body: bytes | bytearray, one: type[M], other: type[N], /) -> M | N: ...
@overload
def decode(body: bytes | bytearray, *expected: type[Message]) -> Message: ...
def decode(body: bytes | bytearray, *expected: type[Message]) -> Message:
    """A message of one of these types.

    Raises:
        ProtocolError: it is none.
    """
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.msgpack.Decoder(Union[expected])  # noqa: UP007
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        # Its words hold no values of the message, but lengths and names of types.
        raise ProtocolError(f"unexpected message: {error}") from None
