# SPDX-License-Identifier: Apache-2.0
"""Kept answers as vLLM would send them: whole, or as a stream.

Chat and completions are made from each other: a request that streams can be answered by what one
that does not has left, and the other way round. An answer of the Messages API is kept in the form
that it had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vllm_metal.serving.response_cache.entry import Entry, Form
from vllm_metal.serving.routes import Style

#: How an answer ends that is complete. Left out are "abort" (a client, a time limit or the server's
#: end) and "error"; and "repetition", which says that the text is not one to repeat.
_ENDS = ("stop", "length", "tool_calls")
_MESSAGE_ENDS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_DONE = b"[DONE]"


def complete(style: Style, entry: Entry) -> bool:
    """Whether an answer has its end, no error in it, and its usage."""
    try:
        if entry.form == "whole":
            return _whole_is_complete(style, json.loads(entry.content))
        if style == "messages":
            return _messages_are_complete(entry.content)
        return _stream_is_complete(entry.content)
    except (ValueError, LookupError, TypeError, AttributeError):  # nothing that vLLM sends
        return False


def content(style: Style, entry: Entry, form: Form, include_usage: bool) -> bytes | None:
    """The body of an answer in the form that a client wants.

    Args:
        style: of the route.
        entry: what is kept; complete.
        form: what the client wants.
        include_usage: whether a stream of it is to have usage.

    Returns:
        None: it cannot be made of what is kept.
    """
    if entry.form == form:
        if form == "whole" or include_usage or style == "messages":
            return entry.content
        return without_usage(entry.content)
    if style not in ("chat", "completion"):
        return None
    if entry.form == "whole":
        return _as_stream(style, json.loads(entry.content), include_usage)
    return _as_whole(style, [json.loads(data) for data in _data(entry.content) if data != _DONE])


def without_usage(stream: bytes) -> bytes:
    """A stream without the event that has nothing but usage."""
    parts = stream.split(b"\n\n")
    return b"\n\n".join(part for part in parts if not is_usage(part))


def is_usage(event: bytes) -> bool:
    """Whether a server-sent event is the one that stream_options.include_usage adds."""
    if b'"choices":[]' not in event or not event.startswith(b"data: {"):
        return False
    try:
        found = json.loads(event[len(b"data: ") :])
    except ValueError:
        return False
    return found.get("choices") == [] and "usage" in found


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
    ends = {choice["index"]: choice["finish_reason"] for choice in choices if _ended(choice)}
    begun = {choice["index"] for choice in choices}
    usage = chunks[-1]["choices"] == [] and "usage" in chunks[-1]
    return bool(begun) and begun == ends.keys() and usage and set(ends.values()) <= set(_ENDS)


def _ended(choice: dict[str, Any]) -> bool:
    return choice.get("finish_reason") is not None


def _messages_are_complete(stream: bytes) -> bool:
    events = [json.loads(data) for data in _data(stream) if data != _DONE]
    ends = [event["delta"].get("stop_reason") for event in events if _type(event, "message_delta")]
    stopped = bool(events) and _type(events[-1], "message_stop")
    failed = any(_type(event, "error") for event in events)
    return stopped and not failed and bool(ends) and ends[-1] in _MESSAGE_ENDS


def _type(event: dict[str, Any], name: str) -> bool:
    return bool(event["type"] == name)


def _data(stream: bytes) -> Iterable[bytes]:
    """The data of each event; comments, which keep connections alive, have none."""
    for line in stream.split(b"\n"):
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :]


def _as_stream(style: Style, answer: dict[str, Any], include_usage: bool) -> bytes | None:
    base = {key: answer[key] for key in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk" if style == "chat" else answer["object"]
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        if style == "completion":
            # A stream has no log-probabilities of the prompt, which is what these are.
            chunks.append({"choices": [_less(choice, "prompt_logprobs")]})
            continue
        message, index = dict(choice["message"]), choice["index"]
        first = {"role": message.pop("role"), "content": ""}
        begin = {"index": index, "delta": first, "logprobs": None, "finish_reason": None}
        ids = {key: answer[key] for key in ("prompt_token_ids", "prompt_text") if answer.get(key)}
        chunks.append({"choices": [begin], **ids})
        delta = {key: value for key, value in message.items() if value not in (None, [])}
        for place, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = place
        chunks.append({"choices": [{**_less(choice, "message"), "delta": delta}]})
    if include_usage:
        chunks.append({"choices": [], "usage": _present(answer["usage"])})
    if fingerprint := answer.get("system_fingerprint"):
        chunks[-1]["system_fingerprint"] = fingerprint
    events = [_compact(base | chunk) for chunk in chunks]
    return b"".join(b"data: " + event + b"\n\n" for event in [*events, _DONE])


def _as_whole(style: Style, chunks: list[dict[str, Any]]) -> bytes | None:
    by_index: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            by_index.setdefault(choice["index"], []).append(choice)
    make = _chat_choice if style == "chat" else _completion_choice
    first, last = chunks[0], chunks[-1]
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    answer = {
        **{key: first[key] for key in ("id", "created", "model")},
        "object": "chat.completion" if style == "chat" else first["object"],
        "choices": [make(index, parts) for index, parts in sorted(by_index.items())],
        "service_tier": None,
        "system_fingerprint": last.get("system_fingerprint"),
        "usage": details | last["usage"],
        "kv_transfer_params": None,
    }
    if style == "chat":
        answer |= {
            "prompt_logprobs": None,
            "prompt_token_ids": first.get("prompt_token_ids"),
            "prompt_text": first.get("prompt_text"),
        }
    return _compact(answer)


def _chat_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    deltas = [part["delta"] for part in parts]
    said = [delta["content"] for delta in deltas if delta.get("content") is not None]
    reasons = [delta["reasoning"] for delta in deltas if delta.get("reasoning") is not None]
    calls = _calls(deltas)
    message: dict[str, Any] = {
        "role": deltas[0].get("role", "assistant"),
        "content": "".join(said) or (None if calls or reasons else ""),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **({"tool_calls": calls} if calls else {}),
        "reasoning": "".join(reasons) or None,
    }
    return {"index": index, "message": message, **_ending(parts, ("content",))}


def _completion_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    lists = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {
        "index": index,
        "text": "".join(part["text"] for part in parts),
        **_ending(parts, lists),
        "prompt_logprobs": None,
        "prompt_token_ids": next(
            (part["prompt_token_ids"] for part in parts if part.get("prompt_token_ids")), None
        ),
    }


def _ending(parts: list[dict[str, Any]], lists: tuple[str, ...]) -> dict[str, Any]:
    """What choices of both kinds have."""
    probabilities = [part["logprobs"] for part in parts if part.get("logprobs")]
    joined = {name: [x for each in probabilities for x in each[name] or ()] for name in lists}
    ids = [part["token_ids"] for part in parts if part.get("token_ids") is not None]
    return {
        "logprobs": joined if probabilities else None,
        "finish_reason": next(part["finish_reason"] for part in parts if _ended(part)),
        "stop_reason": next(part.get("stop_reason") for part in parts if _ended(part)),
        "token_ids": [token for each in ids for token in each] if ids else None,
    }


def _calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls, whose arguments come in parts."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(
                part["index"],
                {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = part.get("id") or call["id"]
            for key, text in (part.get("function") or {}).items():
                call["function"][key] += text or ""
    return [calls[index] for index in sorted(calls)]


def _less(choice: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key not in names}


def _present(usage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in usage.items() if value is not None}


def _compact(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()
