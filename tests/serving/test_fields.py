# SPDX-License-Identifier: Apache-2.0
"""Fields of a body have the same meaning here as in vLLM."""

import pytest
from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from vllm_metal.serving import fields
from vllm_metal.serving.fields import Fields

REQUESTS = {
    "chat": ChatCompletionRequest,
    "completion": CompletionRequest,
    "messages": AnthropicMessagesRequest,
    "responses": ResponsesRequest,
}
NEEDED = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "completion": {"prompt": "Hello"},
    "messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "model": "m"},
    "responses": {"input": "Hello"},
}
VALUES = (
    *(True, False, None, 0, 1, 2, -1, -1.0, 0.0, 0.5, 1e30, 2**63, -(2**63)),
    *("false", "true", "off", "no", "f", "0", "1", "-1", "-1.0", "x", "", [], {}, [1]),
)
OPTIONS = (*VALUES, *({"include_usage": value} for value in VALUES))


@pytest.mark.parametrize(
    ("style", "name"), [(style, name) for style, names in fields.OF_STYLE.items() for name in names]
)
def test_a_field_is_read_as_vllm_reads_it(style, name):
    for value in OPTIONS if name == "stream_options" else VALUES:
        check(style, name, value)


def check(style, name, value):
    body = NEEDED[style] | {name: value} | ({"stream": True} if name == "stream_options" else {})
    try:
        theirs = getattr(REQUESTS[style].model_validate(dict(body)), name)
    except (ValidationError, ValueError, TypeError):
        return  # vLLM refuses it, and answers so
    ours = fields.read(style, body)
    if name == "stream":
        assert ours.stream == bool(theirs)
    elif name == "background":
        assert ours.background == bool(theirs)
    elif name == "stream_options":
        assert ours.usage == bool(theirs and theirs.include_usage)
    elif name == "n":
        assert ours.choices == (theirs or 1)
    elif style == "responses":
        assert not ours.repeatable
    elif name == "temperature":
        assert ours.repeatable == (theirs == 0)
    else:
        assert ours.repeatable == (theirs not in (None, -1))


@pytest.mark.parametrize("style", fields.OF_STYLE)
def test_each_field_has_vllms_type_and_default(style):
    for name in fields.OF_STYLE[style]:
        ours, theirs = fields.Body.model_fields[name], REQUESTS[style].model_fields[name]
        if name == "n":
            assert theirs.annotation in (int, ours.annotation)
        else:
            assert ours.annotation == theirs.annotation
        assert ours.default == theirs.default


def test_what_vllm_refuses_asks_for_nothing():
    assert fields.read("chat", {"stream": "perhaps", "temperature": 0}) == Fields()
    assert fields.read("chat", {"stream_options": 3, "seed": 1}) == Fields()


def test_fields_that_a_route_does_not_know_say_nothing():
    body = {"seed": 5, "temperature": 1, "stream_options": 3, "stream": "on"}
    assert fields.read("messages", body) == Fields(stream=True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([], 1), (None, 1)],
)
def test_choices_are_prompts_times_n(prompt, prompts):
    body = {"prompt": prompt, "n": 3}
    assert fields.read("completion", body).choices == 3 * prompts
    assert fields.read("chat", body).choices == 3
