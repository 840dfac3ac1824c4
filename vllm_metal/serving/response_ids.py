# SPDX-License-Identifier: Apache-2.0
"""Ids of stored responses, which prove their owner.

vLLM keeps the responses of all clients in one dictionary, by ids that clients may choose. With
tenants, the server chooses the ids: 128 random bits, and an HMAC (RFC 2104) of these bits and the
tenant. So the server need not remember owners, and nobody can forge an id of another tenant.
"""

from __future__ import annotations

import hmac
import secrets

from vllm_metal.settings import salts

_DIGITS = 32  # hex digits of each half


def make(secret: bytes, tenant: str) -> str:
    """Returns an id for a new response; `tenant` is the tenant's identity."""
    nonce = secrets.token_hex(_DIGITS // 2)
    mac = salts.mac(secret, "response", f"{tenant}\0{nonce}")
    return f"resp_{nonce}{mac}"


def belongs(secret: bytes, tenant: str, response_id: str) -> bool:
    """Returns whether `make` made the id for the tenant; never raises."""
    prefix, _, digits = response_id.partition("_")
    if prefix != "resp" or len(digits) != 2 * _DIGITS or not digits.isascii():
        return False
    nonce, mac = digits[:_DIGITS], digits[_DIGITS:]
    return hmac.compare_digest(salts.mac(secret, "response", f"{tenant}\0{nonce}"), mac)
