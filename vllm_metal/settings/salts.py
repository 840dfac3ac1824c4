# SPDX-License-Identifier: Apache-2.0
"""Derives `cache_salt`s, and decides by them whether and where a request's K/V are kept on disk."""

from __future__ import annotations

import hmac
import re

# vLLM mixes a request's salt into the hash of its first block, so requests of different salts never
# share blocks. A salt chosen by a client is secret only as long as the client keeps it, and may be
# new with each request, so its blocks stay in memory. A salt derived from the server's own secret
# is stable, so its blocks are kept, in one folder per tenant.

#: The setting that names the secret's file.
SALT_KEY = "prefix_cache_salt_key"
SHARED = "shared"  # the folder of requests without a salt
#: Hex digits kept of each HMAC: half of SHA-256, the minimum by RFC 2104, section 5. vLLM's servers
#: reject salts of more than 128 characters; these have 102.
_DIGITS = 32
#: `vm1-<tenant>-<client>-<mac>`, each 32 hex digits of an HMAC-SHA256 (RFC 2104) under the key: of
#: the tenant, of the client's salt within that tenant, and of the first two parts.
_DERIVED = re.compile(r"(vm1-([0-9a-f]{32})-[0-9a-f]{32})-([0-9a-f]{32})")


def derive(key: bytes, tenant: str, client_salt: str = "") -> str:
    """Derives the `cache_salt` that a server's middleware writes into a request.

    `tenant` is any text that identifies the tenant; `client_salt` is the salt that the client sent,
    "" for none.
    """
    # Two salts of one tenant's clients never share blocks, although one folder keeps both; and
    # nobody without the key can make a salt that `namespace` accepts.
    tenant_id = mac(key, "tenant", tenant)
    client_id = mac(key, "client", f"{tenant_id}-{client_salt}")
    signed = f"vm1-{tenant_id}-{client_id}"
    return f"{signed}-{mac(key, 'salt', signed)}"


def namespace(key: bytes | None, salt: str | None) -> str | None:
    """Returns the folder that keeps a request's blocks; None if they are not kept. Never raises.

    "shared" for a request without a salt (vLLM treats "" as none), "tenant-<32 hex digits>" for a
    salt that `derive` made with this key. Without a key, no request with a salt is kept.
    """
    if salt is None or (isinstance(salt, str) and not salt):
        return SHARED
    if key is None or not isinstance(salt, str):
        return None
    match = _DERIVED.fullmatch(salt)
    if match is None or not hmac.compare_digest(mac(key, "salt", match[1]), match[3]):
        return None
    return f"tenant-{match[2]}"


def mac(key: bytes, purpose: str, text: str) -> str:
    """Returns the first half of an HMAC-SHA256 in hex; `purpose` separates the uses of the key."""
    message = f"vllm-metal {purpose}\0{text}".encode(errors="surrogatepass")
    return hmac.new(key, message, "sha256").hexdigest()[:_DIGITS]
