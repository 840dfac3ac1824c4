# SPDX-License-Identifier: Apache-2.0
"""Parses the event streams of the three APIs that agents use."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: The Messages API reports prompt tokens in three parts.
_MESSAGES_PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@dataclass(frozen=True)
class Answer:
    """A parsed answer.

    Attributes:
        text: its text.
        calls: name and arguments of each tool call, in order.
        prompt, cached: prompt tokens, and those found in the prefix cache; None: not
            reported.
    """

    text: str
    calls: tuple[tuple[str, Any], ...]
    prompt: int | None
    cached: int | None

    @property
    def share(self) -> float | None:
        """Cached share of the prompt, 0 to 1."""
        if self.prompt is None or self.cached is None:
            return None
        return self.cached / self.prompt


def read(path: str, stream: str) -> Answer:
    """Parses the answer in an event stream.

    Args:
        path: path of the request, which determines the API.
        stream: the whole stream.

    Raises:
        KeyError: the path is unknown.
    """
    readers = {
        "/v1/chat/completions": _chat,
        "/v1/responses": _responses,
        "/v1/messages": _messages,
    }
    return readers[path.split("?")[0]](list(_events(stream)))


def _events(stream: str) -> Iterator[dict[str, Any]]:
    for line in stream.splitlines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


def _chat(events: list[dict[str, Any]]) -> Answer:
    text, calls, usage = "", {}, None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                made = calls.setdefault(call["index"], ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
    if usage is None:
        return Answer(text, _called(calls), None, None)
    details = usage.get("prompt_tokens_details") or {}
    return Answer(text, _called(calls), usage["prompt_tokens"], details.get("cached_tokens") or 0)


def _responses(events: list[dict[str, Any]]) -> Answer:
    text, calls, usage = "", [], None
    for event in events:
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            if item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
        elif event["type"] == "response.completed":
            usage = event["response"]["usage"]
    made = _called(dict(enumerate(calls)))
    if usage is None:
        return Answer(text, made, None, None)
    return Answer(text, made, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def _messages(events: list[dict[str, Any]]) -> Answer:
    text, calls, usage = "", {}, {}
    for event in events:
        usage |= event.get("usage") or {}
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[event["index"]][1] += event["delta"]["partial_json"]
    cached = usage.get("cache_read_input_tokens")
    parts = [usage.get(name) for name in _MESSAGES_PROMPT]
    prompt = sum(part or 0 for part in parts) if usage else None
    return Answer(text, _called(calls), prompt, cached)


def _called(calls: dict[int, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns names and arguments in order; arguments that are not JSON stay text."""
    return tuple((name, _arguments(text)) for _, (name, text) in sorted(calls.items()))


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
