# SPDX-License-Identifier: Apache-2.0
"""Encoding of messages as msgpack, and invalid ones."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.kv_transfer.peer import limits, messages
from vllm_metal.kv_transfer.peer.messages import ProtocolError

REQUESTS = (messages.Ask, messages.Fetch, messages.Renew, messages.Release)
ALL = (
    *REQUESTS,
    *(messages.Greeting, messages.Busy, messages.Proof, messages.Welcome, messages.Stranger),
    *(messages.Offer, messages.Waiting, messages.Found, messages.Row, messages.NoPage),
    messages.Done,
)
KEYS = st.lists(st.binary(min_size=1, max_size=64), max_size=20)


@given(
    st.one_of(st.builds(messages.Ask, KEYS, st.integers(0, 2**63)), st.builds(messages.Fetch, KEYS))
)
def test_a_message_comes_back(message):
    plain = msgspec.msgpack.decode(messages.encode(message))
    assert plain[0] == type(message).__name__ and plain[1] == message.keys
    assert messages.decode(messages.encode(message), *REQUESTS) == message


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_bytes_are_a_message_or_a_protocol_error(body):
    try:
        messages.decode(body, *ALL)
    except ProtocolError as error:
        assert len(str(error)) < 300


def packed(*values):
    return msgspec.msgpack.encode(values)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 100_000,
        packed("Ask"),
        packed("Ask", [], 0, 0),
        packed("Ask", [b""], 0),
        packed("Ask", [b"k" * 65], 0),
        packed("Ask", ["key"], 0),
        packed("Ask", [b"key"], -1),
        packed("Ask", [b"key"], 1.5),
        packed("Ask", [b"k"] * (limits.MAX_KEYS + 1), 0),
        packed("Fetch", {b"key": 1}),
        packed("Renew") + b"\0",
        packed("Found", b""),
        packed("Nothing"),
        msgspec.msgpack.encode({"type": "Renew"}),
        b"\x93\xa3Ask\xdd\xff\xff\xff\xff\0",
        b"\x92\xa5Fetch\xdd\x00\x00\x7f\xff",
    ],
)
def test_what_is_no_request(body):
    with pytest.raises(ProtocolError):
        messages.decode(body, *REQUESTS)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (messages.Greeting, [b"n" * 31]),
        (messages.Proof, [b"s" * 16, b"n" * 32, b"p" * 33]),
        (messages.Proof, [b"s" * 15, b"n" * 32, b"p" * 32]),
        (messages.Welcome, [b"p" * 31]),
        (messages.Row, [-1, b"c" * 16]),
        (messages.Row, [1 << 40, b"c" * 16]),
        (messages.Row, [1, b"c" * 15]),
        (messages.Offer, ["e" * 257, "f", [1], b""]),
        (messages.Offer, ["e", "f", [1] * 257, b""]),
        (messages.Offer, ["e", "f", [1], b"x" * (limits.MAX_FACTS_BYTES + 1)]),
        (messages.Found, [b"x" * (limits.MAX_KEYS // 8 + 1)]),
    ],
)
def test_fields_have_limits(kind, values):
    with pytest.raises(ProtocolError):
        messages.decode(packed(kind.__name__, *values), kind)


def test_the_longest_messages_fit_their_limits():
    keys = [b"k" * limits.MAX_KEY_BYTES] * limits.MAX_KEYS
    assert len(messages.encode(messages.Ask(keys, 2**63))) < limits.MAX_MESSAGE_BYTES
    offer = messages.Offer("e" * 256, "f" * 256, [2**39] * 256, b"x" * limits.MAX_FACTS_BYTES)
    assert len(messages.encode(offer)) < limits.MAX_MESSAGE_BYTES
    proof = messages.Proof(b"s" * 16, b"n" * 32, b"p" * 32)
    assert len(messages.encode(proof)) < limits.MAX_UNKNOWN_BYTES
