# SPDX-License-Identifier: Apache-2.0
"""Minimal agents: a loop around each client library, with three tools."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
from agents.clients import MODEL

_TEXT = {"type": "string"}
_EDIT = {"type": "object", "properties": {"oldText": _TEXT, "newText": _TEXT}}
#: Parameters of pi's tools, by name.
_TOOLS = {
    "read": {"path": _TEXT},
    "edit": {"path": _TEXT, "edits": {"type": "array", "items": _EDIT}},
    "bash": {"command": _TEXT},
}
_RULES = "You work in a folder and call tools. " * 200  # as long as a small agent's prompt


def call(name: str, arguments: Mapping[str, Any], folder: Path) -> str:
    """Executes a tool call in `folder`; returns the result for the model."""
    if name == "read":
        return (folder / arguments["path"]).read_text()
    if name == "edit":
        path = folder / arguments["path"]
        for edit in arguments["edits"]:
            path.write_text(path.read_text().replace(edit["oldText"], edit["newText"]))
        return "Edited."
    command = ["sh", "-c", arguments["command"]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def openai_loop(url: str, prompt: str, folder: Path) -> str:
    """Runs streamed Chat Completions until the model calls no tool; returns its last text."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    functions = [
        {"name": name, "parameters": {"type": "object", "properties": properties}}
        for name, properties in _TOOLS.items()
    ]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    messages: list[Any] = [
        {"role": "system", "content": _RULES},
        {"role": "user", "content": prompt},
    ]
    while True:
        options: Any = {"stream_options": {"include_usage": True}}
        with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools, **options
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={*_KEPT}))
        if not message.tool_calls:
            return message.content or ""
        for each in message.tool_calls:
            result = call(each.function.name, json.loads(each.function.arguments), folder)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


_KEPT = ("role", "content", "tool_calls")


def anthropic_loop(url: str, prompt: str, folder: Path) -> str:
    """Runs streamed Messages until the model calls no tool; returns its last text."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=2)
    tools: Any = [
        {"name": name, "input_schema": {"type": "object", "properties": properties}}
        for name, properties in _TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        with client.messages.stream(
            model=MODEL, max_tokens=1024, system=_RULES, messages=messages, tools=tools
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        called = [block for block in message.content if block.type == "tool_use"]
        if not called:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": call(block.name, block.input, folder),
            }
            for block in called
        ]
        messages.append({"role": "user", "content": results})
