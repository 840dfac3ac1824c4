# SPDX-License-Identifier: Apache-2.0
"""Makes the key of a kept answer, of all that two requests must have in common to share one.

The key is a digest of the rendered prompt's tokens, of the body, of the model and its server, and
of the tenant. A body's fields count unless they are listed as harmless, so one that nobody here has
heard of counts.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_metal.serving.fields import Fields
from vllm_metal.serving.routes import Style

#: They say who asks, how the answer is sent, or when it is computed; not what it is. Whether it is
#: a stream, and what of its usage is in it, counts as vLLM reads it, not as it is written.
HARMLESS = ("stream", "stream_options", "user", "metadata", "request_id", "priority")
#: vLLM's renderer, as a route has it: each prompt; None: the request is not a good one.
Render = Callable[[Style, dict[str, Any]], Awaitable["list[Rendered] | None"]]


class Rendered(NamedTuple):
    """A prompt, as the engine gets it."""

    tokens: list[int]
    #: vLLM's hashes of images and videos by their kind. What is behind an address may change.
    media: Mapping[str, Sequence[str]] = MappingProxyType({})


async def of_request(
    style: Style, fields: dict[str, Any], read: Fields, tenant: str, model: str, render: Render
) -> str | None:
    """The key, as 64 hex digits; None: the request is not a good one, which the engine will say.

    Args:
        style: of the route.
        fields: of the body, as the client sent them.
        read: what vLLM reads in them. The answer's form is part of it, as vLLM may say the same
            otherwise in the other form.
        tenant: the identity of who asks; "" where there are no tenants.
        model: the fingerprint of model and server.
        render: makes tokens of the prompt. Templates may have more in them than the body, such as
            the date, so that the body alone does not tell.
    """
    prompts = await render(style, fields)
    if prompts is None:
        return None
    counted = {name: value for name, value in fields.items() if name not in HARMLESS}
    counted["stream"] = [read.stream, read.usage, read.every_usage]
    facts = {"tenant": tenant, "model": model, "style": style, "fields": counted}
    made = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tokens, media in prompts:
        made.update(b"\0%d\0" % len(tokens))
        made.update(array("q", tokens).tobytes())
        if media:
            named = {kind: list(hashes) for kind, hashes in media.items()}
            made.update(json.dumps(named, sort_keys=True).encode())
    return made.hexdigest()
