# SPDX-License-Identifier: Apache-2.0
"""Decides whether a response is complete, so that it may be cached."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.routes import Style

#: Finish reasons of complete responses. Excluded are "abort" (by a client, a deadline or the
#: server's end), "error", and "repetition", which marks text that should not be repeated.
_ENDS = ("stop", "length", "tool_calls")
_MESSAGE_ENDS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_DONE = b"[DONE]"


def is_complete(style: Style, entry: Entry) -> bool:
    """Returns whether a response reached its regular end and contains no error."""
    try:
        if entry.form == "whole":
            return _whole_is_complete(style, json.loads(entry.content))
        if style == "messages":
            return _messages_are_complete(entry.content)
        return _stream_is_complete(entry.content)
    except (ValueError, LookupError, TypeError, AttributeError):  # not a format that vLLM sends
        return False


def _whole_is_complete(style: Style, answer: dict[str, Any]) -> bool:
    if style == "messages":
        return answer["stop_reason"] in _MESSAGE_ENDS and "usage" in answer
    ends = [choice["finish_reason"] in _ENDS for choice in answer["choices"]]
    return bool(ends) and all(ends) and answer["usage"] is not None


def _stream_is_complete(stream: bytes) -> bool:
    found = list(_data(stream))
    if not found or found.pop() != _DONE:
        return False
    chunks = [json.loads(data) for data in found]
    if any("error" in chunk for chunk in chunks):
        return False
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ended = [choice for choice in choices if choice.get("finish_reason") is not None]
    ends = {choice["index"]: choice["finish_reason"] for choice in ended}
    begun = {choice["index"] for choice in choices}
    return bool(begun) and begun == ends.keys() and set(ends.values()) <= set(_ENDS)


def _messages_are_complete(stream: bytes) -> bool:
    events = [json.loads(data) for data in _data(stream) if data != _DONE]
    ends = [event["delta"].get("stop_reason") for event in events if _type(event, "message_delta")]
    stopped = bool(events) and _type(events[-1], "message_stop")
    failed = any(_type(event, "error") for event in events)
    return stopped and not failed and bool(ends) and ends[-1] in _MESSAGE_ENDS


def _type(event: dict[str, Any], name: str) -> bool:
    return bool(event["type"] == name)


def _data(stream: bytes) -> Iterable[bytes]:
    """Yields the data of each event, and skips comments, which keep connections alive."""
    for line in stream.split(b"\n"):
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :]
