# SPDX-License-Identifier: Apache-2.0
"""Image fields that tenants may not set; other bodies are not parsed twice."""

import asyncio

import pytest
from serving_double import App, ask, make

from vllm_metal.serving import media
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.routes import ROUTES

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(*parts, **more):
    return {"model": "m", "messages": [{"role": "user", "content": [*parts]}]} | more


def output(*parts):
    return {"type": "function_call_output", "call_id": "c", "output": [*parts]}


@pytest.mark.parametrize(
    "fields",
    [
        chat(IMAGE),
        chat(IMAGE | {"uuid": None}, mm_processor_kwargs=None, media_io_kwargs={}),
        {"model": "m", "messages": "none", "input": "a text"},
        {"model": "m", "messages": [1, {"content": "a text"}, {"content": [2, "uuid"]}]},
        # Arguments and schemas of tools, as each API has them.
        chat({"type": "tool_use", "name": "f", "input": {"image_url": "u", "uuid": "1"}}),
        {"messages": [{"tool_calls": [{"function": {"name": "f", "arguments": '{"uuid": 1}'}}]}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": {"file": 1, "uuid": 2}}]},
        {"tools": [{"function": {"parameters": {"properties": {"image": {}, "uuid": {}}}}}]},
        {"response_format": {"schema": {"properties": {"image": {}, "uuid": {}}}}},
        {"metadata": {"uuid": "a session"}, "messages": [{"uuid": "a message"}]},
    ],
)
def test_images_pass(fields):
    media.check(fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (chat(IMAGE | {"uuid": "another's"}), "uuid"),
        ({"input": chat(IMAGE | {"uuid": ""})["messages"]}, "uuid"),
        # Tools' output is read as content is.
        ({"input": [output({"type": "input_image", "image_url": None, "uuid": "s"})]}, "uuid"),
        ({"input": [output({"image_url": IMAGE["image_url"], "uuid": "s"})]}, "uuid"),
        (chat({"type": "tool_result", "content": [{"type": "image", "uuid": "s"}]}), "uuid"),
        *(
            ({"deep": [[{"content": [{"type": kind, "uuid": "s"}]}]]}, "uuid")
            for kind in ("image_pil", "image_embeds", "prompt_embeds", "audio_url", "input_audio")
        ),
        *(
            ({name: {"content": [{"video_url": {"url": "u"}, "uuid": "s"}]}}, "uuid")
            for name in ("queries", "documents", "text_1", "data_1")
        ),
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


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body], ids=lambda r: r.path)
def test_uuids_of_images_alone_are_refused_on_every_route(tmp_path, route):
    app = App()
    gate, keys = make(app, tmp_path, cache=False)
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"uuid": "u", "image": "i"}}
    for part, status in ((IMAGE | {"uuid": "u"}, 400), (call, 200)):
        fields = {"messages": chat(part)["messages"], "input": [output(part)], "documents": [part]}
        assert asyncio.run(ask(gate, route.path, fields, keys["acme"])).status == status
