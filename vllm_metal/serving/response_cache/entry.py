# SPDX-License-Identifier: Apache-2.0
"""Entry: a cached response, signed for a store."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Literal

#: "whole": one JSON object. "stream": server-sent events.
Form = Literal["whole", "stream"]
_FORMS: dict[bytes, Form] = {b"w": "whole", b"s": "stream"}
_MARKS = {form: mark for mark, form in _FORMS.items()}
_MAC_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """A complete response with status 200."""

    form: Form
    content: bytes

    def seal(self, secret: bytes, key: str) -> bytes:
        """Returns bytes for a store, with a MAC that is valid only for this key and content."""
        content = _MARKS[self.form] + self.content
        return _mac(secret, key, content) + content

    @staticmethod
    def unseal(sealed: bytes, secret: bytes, key: str) -> Entry | None:
        """Reads the result of `seal`; None if it was made with another secret or key."""
        mac, content = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, key, content)):
            return None
        form = _FORMS.get(content[:1])
        return None if form is None else Entry(form, content[1:])


def _mac(secret: bytes, key: str, content: bytes) -> bytes:
    made = hmac.new(secret, f"vllm-metal answer\0{key}\0".encode(), "sha256")
    made.update(content)
    return made.digest()
