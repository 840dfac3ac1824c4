# SPDX-License-Identifier: Apache-2.0
"""Answers in the other form, against the accumulator of OpenAI's own client."""

import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from vllm.entrypoints.generate.base.protocol import FunctionCall, ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from vllm_metal.serving.response_cache import replay
from vllm_metal.serving.response_cache.entry import Entry

CALLS = [
    ToolCall(id="a", function=FunctionCall(name="weather", arguments='{"town": "Paris"}')),
    ToolCall(id="b", function=FunctionCall(name="time", arguments="{}")),
]
MESSAGES = {
    "text": ChatMessage(role="assistant", content="Paris \u2028 é"),
    "empty": ChatMessage(role="assistant", content=""),
    "reasoning": ChatMessage(role="assistant", content="Paris", reasoning="It is the capital."),
    "tools": ChatMessage(role="assistant", content=None, tool_calls=CALLS),
    "both": ChatMessage(role="assistant", content="I look.", tool_calls=CALLS[:1]),
}


def answer(message, end):
    """As vLLM writes it."""
    choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason=end)
    usage = UsageInfo(prompt_tokens=5, completion_tokens=3, total_tokens=8)
    made = ChatCompletionResponse(id="x", created=1, model="m", choices=[choice], usage=usage)
    return json.dumps(made.model_dump()).encode()


def accumulated(stream):
    """What OpenAI's client makes of a stream."""
    state = ChatCompletionStreamState()
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: {")]
    for line in lines:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
    return state.current_completion_snapshot


def said(completion):
    """What counts of a completion, as the client has it."""
    (choice,) = completion.choices
    message = choice.message
    calls = [
        (call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    reasoning = getattr(message, "reasoning", None)
    usage = completion.usage.total_tokens
    return message.role, message.content or "", reasoning, calls, choice.finish_reason, usage


@pytest.mark.parametrize("name", MESSAGES)
def test_a_whole_answer_as_a_stream_and_back(name):
    end = "tool_calls" if "tool" in name or name == "both" else "stop"
    whole = answer(MESSAGES[name], end)
    kept = Entry("whole", whole)
    assert replay.complete("chat", kept)
    stream = replay.content("chat", kept, "stream", True)
    assert stream.endswith(b"data: [DONE]\n\n")
    original = ChatCompletion.model_validate_json(whole)
    assert said(accumulated(stream)) == said(original)
    assert replay.complete("chat", Entry("stream", stream))
    back = replay.content("chat", Entry("stream", stream), "whole", True)
    assert said(ChatCompletion.model_validate_json(back)) == said(original)
    assert b"usage" not in replay.content("chat", kept, "stream", False)


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


def call(index, **function):
    more = {"id": "a", "type": "function"} if "name" in function else {}
    return {"tool_calls": [{"index": index, **more, "function": function}]}


def test_parts_of_tool_calls_are_put_together():
    stream = events(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "I "}),
        chunk({"reasoning": "look."}),
        chunk(call(0, name="weather", arguments="")),
        chunk(call(0, arguments='{"town": ')),
        chunk(call(0, arguments='"Paris"}')),
        chunk(call(1, name="time", arguments="{}")),
        chunk({}, "tool_calls"),
        USAGE,
    )
    assert replay.complete("chat", Entry("stream", stream))
    whole = json.loads(replay.content("chat", Entry("stream", stream), "whole", True))
    expected = accumulated(stream)
    made = ChatCompletion.model_validate(whole)
    (ours,), (theirs,) = made.choices, expected.choices
    calls = [
        [(x.function.name, x.function.arguments) for x in choice.message.tool_calls]
        for choice in (ours, theirs)
    ]
    assert calls[0] == calls[1]
    assert whole["choices"][0]["message"]["reasoning"] == "I look."
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["usage"]["total_tokens"] == 8


BEGIN, TEXT = chunk({"role": "assistant", "content": ""}), chunk({"content": "a"}, "stop")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"data: [DONE]\n\n",
        events(BEGIN, TEXT),  # no usage
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
    assert replay.complete("chat", Entry("stream", events(BEGIN, TEXT, USAGE)))
    assert not replay.complete("chat", Entry("stream", stream))


@pytest.mark.parametrize("content", [b"null", b"[]", b"{}", b"", b'{"choices": [], "usage": {}}'])
@pytest.mark.parametrize("style", ["chat", "completion", "messages"])
def test_what_is_no_answer_is_not_complete(style, content):
    assert not replay.complete(style, Entry("whole", content))
