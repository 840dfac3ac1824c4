# SPDX-License-Identifier: Apache-2.0
"""Messages between two engines: msgpack of msgspec structs, validated when decoded.

Both sides first send `MAGIC` and the protocol version. Then the server sends `Greeting`, the client
`Proof`, the server `Welcome`, the client its `Offer`, and the server its own. From then on the
client sends requests, one at a time, and the server answers; a page's raw bytes follow each `Row`.
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
NONCE_BYTES = 32  # the size of SHA-256, so none repeats
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
    """A block of one KV cache group, unchanged while it is referenced."""

    data: memoryview  # read-only bytes
    checksum: bytes  # 16 bytes, over data and key


def checksum(key: bytes, hashed: blake3) -> bytes:
    """Returns the first 16 bytes of the BLAKE3 of a page, already in `hashed`, and its key."""
    # The key comes last, as BLAKE3 is three times as fast on aligned parts.
    return hashed.update(key).digest(length=CHECKSUM_BYTES)


class ProtocolError(Exception):
    """The other side violates the protocol; its connection is closed."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Greeting(Message, frozen=True):
    """Server: challenges the client to prove the secret."""

    nonce: Nonce


class Busy(Message, frozen=True):
    """Server: all its connections are in use, and it closes this one."""


class Proof(Message, frozen=True):
    """Client: proves that it has the secret, and challenges the server."""

    session: Session  # shared by all connections of one client, and unique to it
    nonce: Nonce
    proof: ProofBytes


class Welcome(Message, frozen=True):
    """Server: accepts the client's proof, and proves that it has the secret."""

    proof: ProofBytes


class Stranger(Message, frozen=True):
    """Server: rejects the proof, and closes the connection."""


class Offer(Message, frozen=True):
    """Both: the sender's terms. If they differ, the server sends its offer and disconnects."""

    engine_id: Name
    fingerprint: Name
    page_bytes: Annotated[list[PageBytes], Meta(max_length=256)]
    #: JSON, empty from a client. Only decoded to describe a difference.
    facts: Annotated[bytes, Meta(max_length=MAX_FACTS_BYTES)]


class Ask(Message, frozen=True):
    """Client: looks up pages, and leases those found to its session."""

    keys: Keys
    wait_ms: Annotated[int, Meta(ge=0)]  # for pages being produced; the server has a limit


class Waiting(Message, frozen=True):
    """Server: pages are being produced or copied, and the answer follows later."""


class Found(Message, frozen=True):
    """Server: names the requested pages that it has."""

    there: Annotated[list[bool], Meta(max_length=MAX_KEYS)]


class Fetch(Message, frozen=True):
    """Client: requests pages in this order. `Waiting` messages may precede the first."""

    keys: Keys


class Row(Message, frozen=True):
    """Server: a page; `size` raw bytes follow."""

    size: PageBytes
    checksum: Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]


class NoPage(Message, frozen=True):
    """Server: the next page is missing, and no more follow."""


class Renew(Message, frozen=True):
    """Client: extends the leases of its session."""


class Release(Message, frozen=True):
    """Client: ends its leases on these pages."""

    keys: Keys


class Done(Message, frozen=True):
    """Server: confirms `Renew` or `Release`."""


M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)

_DECODERS: dict[tuple[type[Message], ...], msgspec.msgpack.Decoder] = {}


def encode(message: Message) -> bytes:
    """Encodes a message, without its length."""
    return msgspec.msgpack.encode(message)


@overload
def decode(body: bytes | bytearray, expected: type[M], /) -> M: ...
@overload
def decode(body: bytes | bytearray, one: type[M], other: type[N], /) -> M | N: ...
@overload
def decode(body: bytes | bytearray, *expected: type[Message]) -> Message: ...
def decode(body: bytes | bytearray, *expected: type[Message]) -> Message:
    """Decodes a message of one of these types; raises ProtocolError if it is not one."""
    decoder = _DECODERS.get(expected)
    if decoder is None:
        decoder = _DECODERS[expected] = msgspec.msgpack.Decoder(Union[expected])  # noqa: UP007
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        # This text contains no values of the message, only lengths and type names.
        raise ProtocolError(f"unexpected message: {error}") from None
