# SPDX-License-Identifier: Apache-2.0
"""The report in a response's usage, in any pieces, as clients read it."""

import json

import anthropic.types
import hypothesis
import openai.types.chat
import openai.types.responses
import pytest
from hypothesis import strategies as st

from vllm_metal.serving.prefix_misses.explain import Miss
from vllm_metal.serving.prefix_misses.usage import UsageWriter
from vllm_metal.serving.prefix_misses.watch import Exchange

MISS = Miss("date", 16, 5120, 37, 0, "system", before="2026-11-25", now="2026-11-26")
REPORT = {
    **{"cause": "date", "cached": 16, "lost": 5120},
    **{"token": 37, "message": 0, "role": "system"},
}
TEXT = 'It says "usage": 5.\n\nü'
COUNTS = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
CHAT = {
    **{"id": "1", "object": "chat.completion", "created": 1, "model": "m"},
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}
    ],
    "usage": {**COUNTS, "prompt_tokens_details": None},
}
MESSAGE = {
    **{"id": "1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"},
    "content": [{"type": "text", "text": TEXT}],
    "usage": {"input_tokens": 9, "output_tokens": 1},
}
RESPONSE = {
    **{"id": "1", "object": "response", "created_at": 1, "model": "m", "output": []},
    "usage": {
        **{"input_tokens": 9, "output_tokens": 1, "total_tokens": 10},
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
    },
}


def whole(style, answer):
    return json.loads(
        UsageWriter(style, Exchange(MISS), False).write(json.dumps(answer).encode(), True)
    )


def event(data, name=None):
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def written(style, stream, cuts=()):
    """Returns the rewritten stream of these pieces."""
    writer, data = UsageWriter(style, Exchange(MISS), True), stream.encode()
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    out = [writer.write(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return b"".join(out).decode()


def data(stream):
    """Returns the objects of a stream's events."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_chats_details_have_it_and_the_openai_client_reads_it():
    answer = openai.types.chat.ChatCompletion.model_validate(whole("chat", CHAT))
    details = answer.usage.prompt_tokens_details
    assert details.prefix_cache_miss == REPORT
    assert answer.choices[0].message.content == TEXT


def test_a_texts_details_keep_what_was_there():
    usage = {**COUNTS, "prompt_tokens_details": {"cached_tokens": 16}}
    told = whole("completion", {"choices": [], "usage": usage})
    details = {"cached_tokens": 16, "prefix_cache_miss": REPORT}
    assert told == {"choices": [], "usage": {**COUNTS, "prompt_tokens_details": details}}


def test_a_responses_details_have_it():
    told = openai.types.responses.Response.construct(**whole("responses", RESPONSE))
    assert told.usage.input_tokens_details.prefix_cache_miss == REPORT
    assert told.usage.input_tokens_details.cached_tokens == 16


def test_a_messages_usage_has_it_and_anthropics_client_reads_it():
    told = anthropic.types.Message.model_validate(whole("messages", MESSAGE))
    assert told.usage.prefix_cache_miss == REPORT
    assert told.content[0].text == TEXT


def test_what_is_not_known_is_not_said():
    said = UsageWriter("messages", Exchange(Miss("first_seen", 0, 99)), False)
    told = json.loads(said.write(json.dumps(MESSAGE).encode(), True))
    assert told["usage"]["prefix_cache_miss"] == {"cause": "first_seen", "cached": 0, "lost": 99}


@pytest.mark.parametrize("body", ["no JSON", '"usage"', '{"usage": null}', '[{"usage": {}}]', ""])
def test_what_has_no_usage_is_left_as_it_is(body):
    told = UsageWriter("chat", Exchange(MISS), False).write(body.encode(), True).decode()
    assert told.replace(" ", "") == body.replace(" ", "")


@hypothesis.given(st.lists(st.integers(0, 2000), max_size=6))
def test_streams_have_it_where_usage_is_and_are_else_the_same(cuts):
    delta = {"choices": [{"index": 0, "delta": {"content": TEXT}}], "usage": None}
    last = {"choices": [], "usage": COUNTS}
    stream = event(delta) + ": a comment\n\n" + event(last) + event("[DONE]")
    told = written("chat", stream, cuts)
    usage = {**COUNTS, "prompt_tokens_details": {"prefix_cache_miss": REPORT}}
    assert data(told) == [delta, {"choices": [], "usage": usage}]
    assert ": a comment\n\n" in told
    assert told.endswith(event("[DONE]"))
    assert told.count("\n\n") == stream.count("\n\n")


@pytest.mark.parametrize(
    ("style", "events", "places"),
    [
        (
            "responses",
            [
                ("response.created", {"response": {**RESPONSE, "usage": None}}),
                ("response.completed", {"response": RESPONSE}),
            ],
            [None, ("response", "usage", "input_tokens_details")],
        ),
        (
            "messages",
            [
                ("message_start", {"message": MESSAGE}),
                ("content_block_delta", {"delta": {"type": "text_delta", "text": TEXT}}),
                ("message_delta", {"delta": {}, "usage": {"output_tokens": 1}}),
            ],
            [("message", "usage"), None, ("usage",)],
        ),
    ],
)
def test_events_with_a_usage_have_it(style, events, places):
    told = data(written(style, "".join(event(content, name) for name, content in events)))
    for (_, content), place, found in zip(events, places, told, strict=True):
        if place is None:
            assert found == content
            continue
        for name in place:
            found = found[name]
        assert found["prefix_cache_miss"] == REPORT


def test_an_event_is_sent_when_it_is_whole():
    writer = UsageWriter("chat", Exchange(MISS), True)
    assert writer.write(b"data: 1\n", False) == b""
    assert writer.write(b"\ndata: 2", False) == b"data: 1\n\n"
    assert writer.write(b"", True) == b"data: 2"


def test_what_becomes_known_behind_the_first_events_is_said_in_the_last():
    exchange = Exchange()
    writer = UsageWriter("responses", exchange, True)
    first = event({"response": RESPONSE}, "response.created")
    assert writer.write(first.encode(), False).decode() == first
    exchange.miss = MISS
    (last,) = data(writer.write(event({"response": RESPONSE}).encode(), True).decode())
    assert last["response"]["usage"]["input_tokens_details"]["prefix_cache_miss"] == REPORT
