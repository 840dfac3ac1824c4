# SPDX-License-Identifier: Apache-2.0
"""Ids of stored responses, which say whose they are.

vLLM keeps responses of all clients in one dictionary, by ids that a client may choose. Here the
server chooses them: 128 random bits, and an HMAC (RFC 2104) of these and of the tenant. So
nothing has to be remembered, and nobody can write an id that is another's.
"""

from __future__ import annotations

import hmac
import secrets

from vllm_metal.settings import salts

_DIGITS = 32  # hex digits of each half


def make(secret: bytes, tenant: str) -> str:
    """An id for a new response of a tenant, whose identity is given."""
    nonce = secrets.token_hex(_DIGITS // 2)
    mac = salts.mac(secret, "response", f"{tenant}\0{nonce}")
    return f"resp_{nonce}{mac}"


def belongs(secret: bytes, tenant: str, response_id: str) -> bool:
    """Whether an id is one that `make` made for the tenant. It never raises."""
    prefix, _, digits = response_id.partition("_")
    if prefix != "resp" or len(digits) != 2 * _DIGITS or not digits.isascii():
        return False
    nonce, mac = digits[:_DIGITS], digits[_DIGITS:]
    return hmac.compare_digest(salts.mac(secret, "response", f"{tenant}\0{nonce}"), mac)
