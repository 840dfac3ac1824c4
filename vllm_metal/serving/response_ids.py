# SPDX-License-Identifier: Apache-2.0
"""Ids of stored responses, which say whose they are.

vLLM keeps responses of all clients in one dictionary, by ids that a client may choose. Here the
server chooses them: 128 random bits, and an HMAC (RFC 2104) of these and of the tenant. So
nothing has to be remembered, and nobody can write an id that is another's.
"""

from __future__ import annotations

import hmac
import secrets

_DIGITS = 32  # hex digits of each half


def make(secret: bytes, tenant: str) -> str:
    """An id for a new response of a tenant, whose identity is given."""
    nonce = secrets.token_hex(_DIGITS // 2)
    return f"resp_{nonce}{_mac(secret, tenant, nonce)}"


def belongs(secret: bytes, tenant: str, response_id: str) -> bool:
    """Whether an id is one that `make` made for the tenant. It never raises."""
    prefix, _, digits = response_id.partition("_")
    if prefix != "resp" or len(digits) != 2 * _DIGITS or not digits.isascii():
        return False
    return hmac.compare_digest(_mac(secret, tenant, digits[:_DIGITS]), digits[_DIGITS:])


def _mac(secret: bytes, tenant: str, nonce: str) -> str:
    message = f"vllm-metal response\0{tenant}\0{nonce}".encode()
    return hmac.new(secret, message, "sha256").hexdigest()[:_DIGITS]
