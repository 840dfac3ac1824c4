# SPDX-License-Identifier: Apache-2.0
"""Only complete responses without errors are cached."""

import json

import pytest

from vllm_metal.serving.response_cache import complete
from vllm_metal.serving.response_cache.entry import Entry


def chunk(delta, end=None):
    choice = {"index": 0, "delta": delta, "finish_reason": end}
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }


def events(*chunks):
    parts = [f"data: {json.dumps(x, separators=(',', ':'))}\n\n" for x in chunks]
    return "".join([*parts, "data: [DONE]\n\n"]).encode()


USAGE = chunk({}) | {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
}


BEGIN, TEXT = chunk({"role": "assistant", "content": ""}), chunk({"content": "a"}, "stop")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]\n\n",
        events(BEGIN, USAGE),  # no end
        events(BEGIN, chunk({"content": "a"}, "abort"), USAGE),
        events(BEGIN, chunk({"content": "a"}, "repetition"), USAGE),
        events(BEGIN, TEXT, {"error": {"message": "no"}}, USAGE),
        events(BEGIN, TEXT, USAGE).removesuffix(b"data: [DONE]\n\n"),
        events(BEGIN, TEXT, USAGE)[:-40],
        b"data: no json\n\ndata: [DONE]\n\n",
    ],
)
def test_a_stream_that_is_not_whole_is_not_complete(stream):
    for whole in (events(BEGIN, TEXT), events(BEGIN, TEXT, USAGE)):
        assert complete.is_complete("chat", Entry("stream", whole))
    assert not complete.is_complete("chat", Entry("stream", stream))


@pytest.mark.parametrize("content", [b"null", b"[]", b"{}", b"", b'{"choices": [], "usage": {}}'])
@pytest.mark.parametrize("style", ["chat", "completion", "messages"])
def test_what_is_no_answer_is_not_complete(style, content):
    assert not complete.is_complete(style, Entry("whole", content))
