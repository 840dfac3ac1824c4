# SPDX-License-Identifier: Apache-2.0
"""The secret's file, and proofs, against RFC 2104's formula."""

import hashlib

import pytest

from vllm_metal.kv_transfer.peer.limits import PROTOCOL_VERSION
from vllm_metal.kv_transfer.peer.secret import Challenge, make_nonce, read_secret

KEY = b"0123456789abcdef"


def write(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_white_space(tmp_path):
    assert read_secret(write(tmp_path / "key", b"  " + KEY + b"\r\n")) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_others_must_not_read_it(tmp_path, mode):
    path = write(tmp_path / "key", KEY, mode)
    with pytest.raises(ValueError, match=f"chmod 600 {path}") as raised:
        read_secret(path)
    assert "secret: " in str(raised.value) and KEY.decode() not in str(raised.value)


def test_it_must_be_long_enough_and_there(tmp_path):
    with pytest.raises(ValueError, match=r"15 bytes, and a secret needs 16.*openssl rand"):
        read_secret(write(tmp_path / "key", KEY[:15] + b"\n" * 9))
    with pytest.raises(ValueError, match=r"secret: .*cannot be read"):
        read_secret(tmp_path / "none")
    with pytest.raises(ValueError, match=r"secret: .*cannot be read"):
        read_secret(tmp_path)


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
