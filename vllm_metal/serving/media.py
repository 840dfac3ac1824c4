# SPDX-License-Identifier: Apache-2.0
"""Refuses what a tenant's request may not say of images and videos.

What an image is found again by is its content, and what it costs is the server's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal.serving.refusal import Refusal

#: Fields with which a client could have a small image take any memory.
_COSTS = ("mm_processor_kwargs", "media_io_kwargs")


def check(fields: Mapping[str, Any]) -> None:
    """Looks into a body, as the client sent it.

    Raises:
        Refusal: it changes how images are read, or names one by a `uuid`, under which vLLM would
            take another tenant's image for it.
    """
    for name in _COSTS:
        if fields.get(name):
            raise Refusal(400, f"{name} is set for all tenants, with the server's options.")
    if any(part.get("uuid") is not None for part in _parts(fields)):
        raise Refusal(400, "Images have no uuid here: send the image itself.")


def _parts(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Parts of the contents of messages."""
    for name in ("messages", "input"):
        messages = fields.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping):
                    yield part
