# SPDX-License-Identifier: Apache-2.0
"""The secret that two engines share, and how each proves to the other that it knows it.

Challenge and response by HMAC-SHA256 (RFC 2104) over both nonces, the role of who proves, the
session and the protocol's version: a proof of another conversation, role or version proves nothing.
It tells who is there; it does not encrypt what is sent.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from vllm_metal.kv_transfer.peer.limits import PROTOCOL_VERSION

NONCE_BYTES = 32  # as many as SHA-256 gives: none is drawn twice
PROOF_BYTES = 32  # of SHA-256
_PURPOSE = b"vllm-metal peer"


def make_nonce() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Challenge:
    """What both sides of one conversation have proofs of."""

    server_nonce: bytes  # 32 bytes
    client_nonce: bytes  # 32 bytes
    session: bytes  # 16 bytes

    def proof(self, secret: bytes, role: str) -> bytes:
        """32 bytes that nobody makes without the secret.

        Args:
            secret: both sides'.
            role: who proves: "server" or "client".
        """
        message = b"\0".join((_PURPOSE, role.encode(), b"%d" % PROTOCOL_VERSION, b""))
        message += self.server_nonce + self.client_nonce + self.session
        return hmac.digest(secret, message, "sha256")

    def is_proof(self, secret: bytes, role: str, proof: bytes) -> bool:
        """Whether the other side, of that role, knows the secret; takes the same time for all."""
        return hmac.compare_digest(self.proof(secret, role), proof)
