# SPDX-License-Identifier: Apache-2.0
"""Tokens that an answer says it took, in the words of each API."""

import json

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicUsage
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo

from vllm_metal.serving.usage import Usage, last_in

DETAILS = PromptTokenUsageInfo(cached_tokens=16)
RESPONSE = ResponseUsage(
    input_tokens=20,
    output_tokens=3,
    total_tokens=23,
    input_tokens_details=InputTokensDetails(
        cached_tokens=16, cache_write_tokens=0, input_tokens_per_turn=[], cached_tokens_per_turn=[]
    ),
    output_tokens_details=OutputTokensDetails(
        reasoning_tokens=0,
        tool_output_tokens=0,
        output_tokens_per_turn=[],
        tool_output_tokens_per_turn=[],
    ),
)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (UsageInfo(prompt_tokens=20, completion_tokens=3), Usage(20, 0, 3)),
        (
            UsageInfo(prompt_tokens=20, completion_tokens=3, prompt_tokens_details=DETAILS),
            Usage(20, 16, 3),
        ),
        (AnthropicUsage(input_tokens=20, output_tokens=3), Usage(20, 0, 3)),
        (
            AnthropicUsage(input_tokens=4, output_tokens=3, cache_read_input_tokens=16),
            Usage(20, 16, 3),
        ),
        (RESPONSE, Usage(20, 16, 3)),
    ],
)
def test_vllms_own_usage_is_read(usage, expected):
    for text in (usage.model_dump_json(), usage.model_dump_json(exclude_unset=True)):
        answer = b'{"choices":[{"text":"a"}],"usage":' + text.encode() + b',"more":1}'
        assert last_in(answer) == expected
        assert last_in(b"data: " + answer + b"\n\n") == expected


def test_the_last_one_counts_and_texts_do_not():
    said = '"usage":{"prompt_tokens":99}'
    text = json.dumps({"text": said, "usage": {"prompt_tokens": 1}}, separators=(",", ":"))
    assert last_in(text.encode()) == Usage(1, 0, 0)
    only = json.dumps({"text": said}, separators=(",", ":")).encode()
    assert last_in(only) is None
    assert last_in(b"") is None and last_in(b'{"usage":{"prompt_tok') is None
    assert last_in(b'{"usage":null}') is None
