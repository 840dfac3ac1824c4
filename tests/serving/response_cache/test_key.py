# SPDX-License-Identifier: Apache-2.0
"""Requests whose words are alike, and whose images are not, have different keys."""

import asyncio

from vllm_metal.serving.fields import Fields
from vllm_metal.serving.response_cache.key import Rendered, of_request

#: The address is the same; what is behind it need not be.
FIELDS = {"messages": [{"content": [{"image_url": {"url": "http://example.org/now.png"}}]}]}


def key(*prompts):
    async def render(style, fields):
        return [*prompts]

    return asyncio.run(of_request("chat", FIELDS, Fields(), "acme", "model", render))


def test_an_image_counts_by_what_it_shows():
    tokens = [1, 7, 7, 7, 2]
    keys = [
        key(Rendered(tokens)),
        key(Rendered(tokens, {"image": ["a", "b"]})),
        key(Rendered(tokens, {"image": ["b", "a"]})),
        key(Rendered(tokens, {"video": ["a", "b"]})),
        key(Rendered(tokens, {"image": ["a"]}), Rendered(tokens, {"image": ["b"]})),
    ]
    assert len(set(keys)) == len(keys)
    assert key(Rendered(tokens, {"image": ["a", "b"]})) == keys[1]
