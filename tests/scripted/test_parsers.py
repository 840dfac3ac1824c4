# SPDX-License-Identifier: Apache-2.0
"""vLLM's own parsers read a script checkpoint's output."""

import json

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

import scripted
from scripted import Call, Script, Turn
from scripted.dense import Said, asked

pytestmark = pytest.mark.more
CALLS = (Call("read", {"path": "né.txt"}), Call("run", {"command": 'echo "a"'}))
SCRIPT = Script((Turn("Now.", CALLS, reasoning="Let me think."), Turn("Done.")))


def test_reasoning_text_and_several_calls_are_told_apart(tmp_path):
    said = Said(scripted.checkpoint(tmp_path, [SCRIPT]))
    request = ChatCompletionRequest(messages=asked("Do it."), model="script")
    reasons = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(said.tokenizer)
    calls = ToolParserManager.get_tool_parser("hermes")(said.tokenizer)

    reasoning, answer = reasons.extract_reasoning(said(asked("Do it.")), request)
    assert reasoning.strip() == "Let me think."
    found = calls.extract_tool_calls(answer, request)
    assert found.content.strip() == "Now."
    assert [
        (each.function.name, json.loads(each.function.arguments)) for each in found.tool_calls
    ] == [(call.name, call.arguments) for call in CALLS]

    reasoning, answer = reasons.extract_reasoning(said(asked("Do it.", 2)), request)
    assert not reasoning.strip() and answer.strip() == "Done."
