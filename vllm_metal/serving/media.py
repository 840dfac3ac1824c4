# SPDX-License-Identifier: Apache-2.0
"""Refuses what a tenant's request may not say of images and videos.

What an image is found again by is its content, and what it costs is the server's to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal.serving.refusal import Refusal

#: Fields with which a client could have a small image take any memory.
_COSTS = ("mm_processor_kwargs", "media_io_kwargs")
#: Types of media parts, and their keys. vLLM reads a part without a type by its keys.
_MEDIA = re.compile(r"(input_)?(image|audio|video|file)(_url|_pil|_embeds)?|\w+_embeds")
#: What has schemas or arguments of tools in it, where no part of a message can be.
_NO_PARTS = frozenset(("tools", "properties", "$defs", "definitions", "arguments"))


def check(fields: Mapping[str, Any]) -> None:
    """Looks into a body, as the client sent it.

    Raises:
        Refusal: it changes how images are read, or names one by a `uuid`, under which vLLM would
            take another image for it. Images belong to their tenant all the same
            (`vllm_metal/patches/vllm_patches/image_names.py`): this is the second lock.
    """
    for name in _COSTS:
        if fields.get(name):
            raise Refusal(400, f"{name} is set for all tenants, with the server's options.")
    if any(each.get("uuid") is not None and _is_media(each) for each in _objects(fields)):
        raise Refusal(
            400, "The uuid of an image is not supported on this server: send the image itself."
        )


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    named = isinstance(kind, str) and _MEDIA.fullmatch(kind) is not None
    return named or any(_MEDIA.fullmatch(key) for key in part)


def _objects(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields every object in a body that could be a part of a message."""
    waiting: list[Any] = [fields]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, Mapping):
            yield found
            is_call = found.get("type") == "tool_use"  # whose input the model wrote
            waiting += [
                value
                for key, value in found.items()
                if key not in _NO_PARTS and not (is_call and key == "input")
            ]
