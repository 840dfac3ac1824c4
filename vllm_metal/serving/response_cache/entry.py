# SPDX-License-Identifier: Apache-2.0
"""Entry: an answer as it is kept."""

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
    """A complete answer with status 200."""

    form: Form
    content: bytes

    def seal(self, secret: bytes, key: str) -> bytes:
        """Bytes for a store, bound to the key: an entry under another key is no answer."""
        content = _MARKS[self.form] + self.content
        return _mac(secret, key, content) + content

    @staticmethod
    def unseal(sealed: bytes, secret: bytes, key: str) -> Entry | None:
        """The entry in such bytes; None: they were not sealed with this secret for this key."""
        mac, content = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, key, content)):
            return None
        form = _FORMS.get(content[:1])
        return None if form is None else Entry(form, content[1:])


def _mac(secret: bytes, key: str, content: bytes) -> bytes:
    made = hmac.new(secret, f"vllm-metal answer\0{key}\0".encode(), "sha256")
    made.update(content)
    return made.digest()
