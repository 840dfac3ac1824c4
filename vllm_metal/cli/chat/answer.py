# SPDX-License-Identifier: Apache-2.0
"""Turns the chunks of a model's answer into events for the page: new text, HTML, metrics."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_metal.cli.chat import markdown
from vllm_metal.cli.chat.upstream import Model, Reply, Upstream, UpstreamError

#: Minimum seconds between two events; faster updates would not be visible.
_PERIOD = 0.05
#: Minimum pause as a multiple of the time that the last event's HTML took, so that a long answer
#: uses a fifth of a core.
_SHARE = 4.0
Event = dict[str, Any]


def body(model: Model, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the body of a chat completion request.

    Args:
        model: the model that answers.
        asked: the page's request: `messages`; `sampling`, parameters named as in the API, null if
            unset; and `continue`, whether to continue the last message.

    Raises:
        ValueError: messages are missing, or one lacks a role or text, or is not valid Unicode.
    """
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise ValueError("messages: role and content of each message must be strings")
    sampling = asked.get("sampling") or {}
    if not isinstance(sampling, dict):
        raise ValueError("sampling must be an object")
    # Raises for invalid Unicode, which would otherwise break the request while it is streamed.
    json.dumps(asked, ensure_ascii=False).encode()
    given = {name: value for name, value in sampling.items() if value is not None}
    most = given.pop("max_tokens", None) or model.max_tokens
    if isinstance(most, int):
        given["max_tokens"] = model.at_most(most)
    if asked.get("continue"):
        given |= {"continue_final_message": True, "add_generation_prompt": False}
    return {
        **given,
        "model": model.name,
        "messages": [{name: message[name] for name in ("role", "content")} for message in messages],
        "stream": True,
        # With every chunk, because a stopped answer has no last one.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


@dataclass
class Progress:
    """An answer so far: its text, its HTML on the page, its metrics."""

    asked: float  # start time, by `clock`
    clock: Callable[[], float] = time.monotonic
    text: str = ""
    _fresh: dict[str, str] = field(default_factory=lambda: {"text": "", "reasoning": ""})
    _blocks: list[str] = field(default_factory=list)
    _first: float | None = None
    _first_tokens: int = 0  # count at the first text; some tokens add none
    _last: float = 0.0
    _last_tokens: int = 0
    _usage: dict[str, Any] = field(default_factory=dict)
    _drafts: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Adds a chunk of the OpenAI API."""
        self._usage = chunk.get("usage") or self._usage
        self._drafts = (chunk.get("metrics") or {}).get("speculative_decoding") or self._drafts
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            if text or reasoning:
                self._time(self._usage.get("completion_tokens") or 0)
            self.text += text
            self._fresh["text"] += text
            self._fresh["reasoning"] += reasoning
            self.finish = choice.get("finish_reason") or self.finish

    def _time(self, tokens: int) -> None:
        self._last, self._last_tokens = self.clock(), tokens
        if self._first is None:
            self._first, self._first_tokens = self._last, tokens

    def event(self) -> Event:
        """Returns changes since the last event; `blocks` is the HTML of blocks from `from` on."""
        event: Event = {name: text for name, text in self._fresh.items() if text}
        if self._fresh["text"]:
            now = markdown.blocks(self.text)
            event["from"] = markdown.changed(self._blocks, now)
            event["blocks"] = now[event["from"] :]
            self._blocks = now
        self._fresh = {"text": "", "reasoning": ""}
        return event | {"metrics": self.metrics()}

    def metrics(self) -> dict[str, float | int | None]:
        """Returns TTFT in seconds, tokens/s after the first token, and token counts, if known."""
        took = self._last - self._first if self._first is not None else 0.0
        tokens = self._last_tokens - self._first_tokens
        details = self._usage.get("prompt_tokens_details") or {}
        return {
            "ttft": None if self._first is None else self._first - self.asked,
            "tokens": self._usage.get("completion_tokens"),
            "speed": tokens / took if tokens > 0 and took > 0 else None,
            "prompt": self._usage.get("prompt_tokens"),
            "cached": details.get("cached_tokens"),
            "drafted": self._drafts.get("num_draft_tokens"),
            "accepted": self._drafts.get("num_accepted_draft_tokens"),
        }


def limit(
    request: Mapping[str, Any], context: int | None, metrics: Mapping[str, Any]
) -> dict[str, int | str | None]:
    """Returns the limit that ended an answer: its `name` and `tokens`, if known."""
    tokens, prompt, most = metrics["tokens"], metrics["prompt"], request.get("max_tokens")
    if None not in (tokens, prompt, context) and prompt + tokens >= context:
        return {"name": "context", "tokens": context}
    if most is not None and (tokens is None or tokens >= most):
        return {"name": "max_tokens", "tokens": most}
    return {"name": "server", "tokens": tokens}


async def events(
    upstream: Upstream, request: Mapping[str, Any], context: int | None = None
) -> AsyncIterator[Event]:
    """Yields the events of an answer; the last has `done` (the reason) or `error` (a text).

    `request` is made by `body`; `context` is the model's, in tokens, None if unknown.
    """
    continues = "continue_final_message" in request
    text_so_far = request["messages"][-1]["content"] if continues else ""
    progress = Progress(time.monotonic(), text=text_so_far)
    try:
        async with upstream.answer(request) as reply:
            if reply.miss is not None:
                yield {"miss": reply.miss}
            async for event in _paced(progress, reply):
                yield event
    except UpstreamError as error:
        yield progress.event() | {"error": str(error)}
        return
    last = progress.event() | {"done": progress.finish or "unknown"}
    if progress.finish == "length":
        last["limit"] = limit(request, context, last["metrics"])
    yield last


async def _paced(progress: Progress, reply: Reply) -> AsyncIterator[Event]:
    due = 0.0
    async for chunk in reply.chunks:
        progress.add(chunk)
        if (started := time.monotonic()) >= due:
            event = progress.event()
            rendered = time.monotonic()
            due = rendered + max(_PERIOD, _SHARE * (rendered - started))
            yield event
