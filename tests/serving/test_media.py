# SPDX-License-Identifier: Apache-2.0
"""What tenants may not say of images; what has no images is never looked at twice."""

import asyncio

import pytest
from serving_double import App, ask, make

from vllm_metal.serving import media
from vllm_metal.serving.refusal import Refusal

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(*parts, **more):
    return {"model": "m", "messages": [{"role": "user", "content": [*parts]}]} | more


@pytest.mark.parametrize(
    "fields",
    [
        chat(IMAGE),
        chat(IMAGE | {"uuid": None}, mm_processor_kwargs=None, media_io_kwargs={}),
        {"model": "m", "messages": "none", "input": "a text"},
        {"model": "m", "messages": [1, {"content": "a text"}, {"content": [2, "uuid"]}]},
    ],
)
def test_images_pass(fields):
    media.check(fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (chat(IMAGE | {"uuid": "another's"}), "uuid"),
        ({"input": chat(IMAGE | {"uuid": ""})["messages"]}, "uuid"),
        (chat(IMAGE, mm_processor_kwargs={"min_pixels": 10**10}), "mm_processor_kwargs"),
        (chat(IMAGE, media_io_kwargs={"video": {"num_frames": -1}}), "media_io_kwargs"),
    ],
)
def test_what_reaches_another_tenant_is_refused(fields, said):
    with pytest.raises(Refusal, match=said):
        media.check(fields)


def test_a_tenants_request_is_refused_before_vllm_gets_it(tmp_path):
    app = App()
    gate, keys = make(app, tmp_path, cache=False)
    named = chat(IMAGE | {"uuid": "another's"})
    reply = asyncio.run(ask(gate, "/v1/chat/completions", named, keys["acme"]))
    assert (reply.status, app.asked) == (400, 0)
    reply = asyncio.run(ask(gate, "/v1/chat/completions", chat(IMAGE), keys["acme"]))
    assert (reply.status, app.asked) == (200, 1)
