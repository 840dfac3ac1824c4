# SPDX-License-Identifier: Apache-2.0
"""Computes cache keys: digests of everything that requests must agree on to share a response.

A key covers the rendered prompt's tokens, the body, the model and its server, and the tenant. All
fields of the body count except those listed as harmless, so that unknown fields are safe.
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

#: Fields without effect on a response's content. Streaming and usage do affect its form; they count
#: as parsed by vLLM, not as written.
HARMLESS = ("stream", "stream_options", "user", "metadata", "request_id", "priority")
#: vLLM's renderer by route; returns all prompts, or None if the request is invalid.
Render = Callable[[Style, dict[str, Any]], Awaitable["list[Rendered] | None"]]


class Rendered(NamedTuple):
    """Tokens of a rendered prompt, and hashes of its images and videos."""

    tokens: list[int]
    #: vLLM's content hashes of images and videos, by kind, as the content behind a URL may change.
    media: Mapping[str, Sequence[str]] = MappingProxyType({})


async def of_request(
    style: Style, fields: dict[str, Any], read: Fields, tenant: str, model: str, render: Render
) -> str | None:
    """Returns the key as 64 hex digits; None if the request is invalid, which vLLM will report.

    Args:
        style: style of the route.
        fields: the client's body.
        read: the body as parsed by vLLM.
        tenant: the tenant's identity; "" without tenants.
        model: fingerprint of model and server.
        render: renders the body into prompts, as vLLM does.
    """
    # The tokens count as well as the body: templates may add more, such as the date.
    prompts = await render(style, fields)
    if prompts is None:
        return None
    counted = {name: value for name, value in fields.items() if name not in HARMLESS}
    # Form counts, too: vLLM may write the same response differently in a stream.
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
