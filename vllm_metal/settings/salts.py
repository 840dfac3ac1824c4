# SPDX-License-Identifier: Apache-2.0
"""Decides whose K/V are kept on disk, and in which folder, by a request's `cache_salt`.

vLLM mixes a request's salt into the hash of its first block, so requests of different salts never
share blocks. A salt that a client chose is secret only as long as the client keeps it, and may be
new with each request: its blocks stay in memory. A salt that a server derives from a secret of its
own is stable; its blocks are kept, in a folder for each tenant.
"""

from __future__ import annotations

import hmac
import re

#: The setting that names the secret's file.
SALT_KEY = "prefix_cache_salt_key"
SHARED = "shared"  # the folder of requests without a salt
#: Hex digits kept of each HMAC: half of SHA-256, which RFC 2104, section 5, names as the least to
#: keep. vLLM's servers refuse salts of more than 128 characters; these have 102.
_DIGITS = 32
_DERIVED = re.compile(r"(vm1-([0-9a-f]{32})-[0-9a-f]{32})-([0-9a-f]{32})")


def derive(key: bytes, tenant: str, client_salt: str = "") -> str:
    """The `cache_salt` that a server's middleware writes into a request.

    `vm1-<tenant>-<client>-<mac>`, each 32 hex digits of an HMAC-SHA256 (RFC 2104) under the key:
    of the tenant, of the client's salt within that tenant, and of the two before it. So two
    salts of one tenant's clients never share blocks, though they are kept in one folder; and nobody
    without the key can make a salt that `namespace` accepts.

    Args:
        key: the server's secret, as `secret_file.read` returns it.
        tenant: whom the request is served for; any text.
        client_salt: the salt that the client sent; "" for none.
    """
    tenant_id = mac(key, "tenant", tenant)
    client_id = mac(key, "client", f"{tenant_id}-{client_salt}")
    signed = f"vm1-{tenant_id}-{client_id}"
    return f"{signed}-{mac(key, 'salt', signed)}"


def namespace(key: bytes | None, salt: str | None) -> str | None:
    """The folder that keeps the blocks of a request; None: they are not kept.

    "shared" for a request without a salt (vLLM takes "" for none), "tenant-<32 hex digits>" for a
    salt that `derive` made with this key. It never raises, whatever the salt.

    Args:
        key: the server's secret; None: it has none, and no request with a salt is kept.
        salt: the request's `cache_salt`.
    """
    if salt is None or (isinstance(salt, str) and not salt):
        return SHARED
    if key is None or not isinstance(salt, str):
        return None
    found = _DERIVED.fullmatch(salt)
    if found is None or not hmac.compare_digest(mac(key, "salt", found[1]), found[3]):
        return None
    return f"tenant-{found[2]}"


def mac(key: bytes, purpose: str, text: str) -> str:
    """An HMAC-SHA256 in hex, its first half; `purpose` keeps the uses of the one key apart."""
    message = f"vllm-metal {purpose}\0{text}".encode(errors="surrogatepass")
    return hmac.new(key, message, "sha256").hexdigest()[:_DIGITS]
