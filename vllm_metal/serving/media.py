# SPDX-License-Identifier: Apache-2.0
"""Rejects fields on images and videos that a tenant may not set.

Images are cached by content only, and only the server decides what processing one may cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal.serving.refusal import Refusal

#: Fields with which a client could make a small image take any amount of memory.
_COSTS = ("mm_processor_kwargs", "media_io_kwargs")
#: Types and keys of media parts. vLLM identifies a part without a type by its keys.
_MEDIA = re.compile(r"(input_)?(image|audio|video|file)(_url|_pil|_embeds)?|\w+_embeds")
#: Keys of tool schemas and arguments, which contain no message parts.
_NO_PARTS = frozenset(("tools", "properties", "$defs", "definitions", "arguments"))


def check(fields: Mapping[str, Any]) -> None:
    """Raises Refusal if a body changes how images are processed, or has an image's `uuid`.

    vLLM would use whatever image is cached under the uuid. The cache is also separated by tenant
    (`vllm_metal/patches/vllm_patches/image_names.py`); this is a second safeguard.
    """
    for name in _COSTS:
        if fields.get(name):
            raise Refusal(
                400,
                f"{name} is not supported in requests: the server's options set it for all "
                "tenants. Leave it out.",
            )
    if any(each.get("uuid") is not None and _is_media(each) for each in _objects(fields)):
        raise Refusal(
            400, "The uuid of an image is not supported on this server: send the image itself."
        )


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    named = isinstance(kind, str) and _MEDIA.fullmatch(kind) is not None
    return named or any(_MEDIA.fullmatch(key) for key in part)


def _objects(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields every object in a body that could be a message part."""
    waiting: list[Any] = [fields]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, Mapping):
            yield found
            is_call = found.get("type") == "tool_use"  # its input is arguments, of any shape
            waiting += [
                value
                for key, value in found.items()
                if key not in _NO_PARTS and not (is_call and key == "input")
            ]
