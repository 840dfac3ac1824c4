# SPDX-License-Identifier: Apache-2.0
"""Proofs of a secret, against RFC 2104's formula."""

import hashlib

import pytest

from vllm_metal.kv_transfer.peer.handshake import Challenge, make_nonce
from vllm_metal.kv_transfer.peer.limits import PROTOCOL_VERSION

KEY = b"0123456789abcdef"


def hmac_sha256(key, message):
    """RFC 2104, section 2."""
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()


@pytest.mark.parametrize("key", [KEY, b""])
def test_a_proof_is_an_hmac_of_the_whole_conversation(key):
    challenge = Challenge(b"s" * 32, b"c" * 32, b"i" * 16)
    said = b"vllm-metal peer\0client\0%d\0" % PROTOCOL_VERSION
    expected = hmac_sha256(key, said + b"s" * 32 + b"c" * 32 + b"i" * 16)
    assert challenge.proof(key, "client") == expected
    assert challenge.is_proof(key, "client", expected)


def test_a_proof_of_anything_else_proves_nothing():
    challenge = Challenge(b"s" * 32, b"c" * 32, b"i" * 16)
    others = [
        challenge.proof(KEY, "server"),
        challenge.proof(KEY + b"0", "client"),
        challenge.proof(b"", "client"),
        Challenge(b"S" * 32, b"c" * 32, b"i" * 16).proof(KEY, "client"),
        Challenge(b"s" * 32, b"C" * 32, b"i" * 16).proof(KEY, "client"),
        Challenge(b"s" * 32, b"c" * 32, b"I" * 16).proof(KEY, "client"),
        b"\0" * 32,
    ]
    assert len({*others, challenge.proof(KEY, "client")}) == len(others) + 1
    assert not any(challenge.is_proof(KEY, "client", proof) for proof in others)


def test_nonces_differ():
    assert len({make_nonce() for _ in range(1000)}) == 1000
    assert len(make_nonce()) == 32
