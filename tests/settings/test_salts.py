# SPDX-License-Identifier: Apache-2.0
"""Only blocks with salts derived from the server's key are stored, per tenant."""

import hashlib
import random
import re

import pytest

from vllm_metal.kv_transfer.disk import layout
from vllm_metal.settings import salts

KEY = b"0123456789abcdef"
OTHER_KEY = b"0123456789abcdeg"


def hmac_sha256(key, message):
    """RFC 2104, section 2: H(K XOR opad, H(K XOR ipad, text)), with blocks of 64 bytes."""
    key = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).hexdigest()


@pytest.mark.parametrize("key", [KEY, bytes(range(200))])
def test_a_derived_salt_is_made_of_hmacs(key):
    tenant = hmac_sha256(key, b"vllm-metal tenant\0acme")[:32]
    client = hmac_sha256(key, f"vllm-metal client\0{tenant}-mine".encode())[:32]
    signed = f"vm1-{tenant}-{client}"
    mac = hmac_sha256(key, f"vllm-metal salt\0{signed}".encode())[:32]
    assert salts.derive(key, "acme", "mine") == f"{signed}-{mac}"
    assert salts.namespace(key, f"{signed}-{mac}") == f"tenant-{tenant}"


def test_clients_of_a_tenant_share_a_folder_and_no_blocks():
    made = {
        (tenant, client): salts.derive(KEY, tenant, client)
        for tenant in ("a", "b", "", "a-b", "ä\ud800", "x" * 1000)
        for client in ("", "1", "2", "b-1", "\0", "vm1-")
    }
    assert len(set(made.values())) == len(made)
    folders = {salts.namespace(KEY, made[key]): key[0] for key in made}
    assert len(folders) == 6 and None not in folders
    for (tenant, _), salt in made.items():
        folder = salts.namespace(KEY, salt)
        assert folders[folder] == tenant
        assert layout.NAMESPACE.fullmatch(folder)
        assert re.fullmatch(r"tenant-[0-9a-f]{32}", folder)
    assert made["a", "1"] == salts.derive(KEY, "a", "1")  # stable


def test_salts_of_another_key_or_without_a_key_are_not_kept():
    salt = salts.derive(KEY, "acme")
    assert salts.namespace(OTHER_KEY, salt) is None
    assert salts.namespace(None, salt) is None
    assert salts.namespace(OTHER_KEY, salts.derive(OTHER_KEY, "acme")) != salts.namespace(KEY, salt)


@pytest.mark.parametrize("key", [None, KEY])
def test_requests_without_a_salt_share(key):
    assert salts.namespace(key, None) == salts.namespace(key, "") == "shared"


@pytest.mark.parametrize(
    "salt",
    [
        *(
            "shared",
            "tenant-x",
            "../../etc",
            "vm1",
            "vm1---",
            "\0",
            "\ud800",
            "ä" * 500,
            "x" * 10**6,
        ),
        *(b"vm1-", 0, 1, 1.5, True, [], {}, object()),
    ],
)
def test_no_other_salt_is_kept_and_none_raises(salt):
    for key in (None, KEY):
        assert salts.namespace(key, salt) is None


def test_a_mangled_salt_is_not_kept():
    """Replaces each character by every other and some outside the alphabet; cuts; swaps."""
    salt = salts.derive(KEY, "acme", "mine")
    other = salts.derive(KEY, "other", "mine")
    for place in range(len(salt)):
        for letter in "0123456789abcdefABCDEF-vmx\uff11\u0660 \n":
            mangled = salt[:place] + letter + salt[place + 1 :]
            if mangled != salt:
                assert salts.namespace(KEY, mangled) is None, mangled
        assert place == 0 or salts.namespace(KEY, salt[:place]) is None
        if (spliced := salt[:place] + other[place:]) not in (salt, other):
            assert salts.namespace(KEY, spliced) is None
    for around in (f" {salt}", f"{salt}\n", f"{salt}0", f"{salt}-", salt.upper(), salt * 2):
        assert salts.namespace(KEY, around) is None


def test_a_forger_without_the_key_gets_nothing():
    """Builds salts from all but the key: parts of real ones, guessed keys, random bytes."""
    rng = random.Random(3)
    seen = salts.derive(KEY, "victim", "client")
    _, tenant, client, mac = seen.split("-")
    for _ in range(2000):
        digits = "".join(rng.choices("0123456789abcdef", k=64))
        guess = rng.randbytes(rng.choice((16, 32)))
        signed = f"vm1-{tenant}-{digits[:32]}"
        for forged in (
            f"{signed}-{mac}",
            f"{signed}-{digits}",
            f"{signed}-{hmac_sha256(guess, f'vllm-metal salt{chr(0)}{signed}'.encode())}",
            f"vm1-{digits[:32]}-{client}-{mac}",
            salts.derive(guess, "victim", "client"),
        ):
            assert salts.namespace(KEY, forged) is None
