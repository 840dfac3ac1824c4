# SPDX-License-Identifier: Apache-2.0
"""Adds the report of a miss to a response's usage, for clients that request it.

    "usage": {..., "prompt_tokens_details": {"prefix_cache_miss": {"cause": "date", "lost": 5120}}}

The report is added to what vLLM responds, so that neither other clients nor cached responses get
the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from vllm_metal.serving.prefix_misses.explain import Miss
from vllm_metal.serving.prefix_misses.watch import Exchange
from vllm_metal.serving.routes import Style

NAME = "prefix_cache_miss"
#: Key of a usage's prompt details; None: the report goes into the usage itself.
_DETAILS: Mapping[Style, str | None] = MappingProxyType(
    {
        "chat": "prompt_tokens_details",
        "completion": "prompt_tokens_details",
        "responses": "input_tokens_details",
        "messages": None,
    }
)
#: Keys of events that contain the response, and with it the usage.
_PARTS = ("response", "message")
_END = b"\n\n"  # ends an event


def report(miss: Miss) -> dict[str, str | int]:
    """Returns the report as a JSON object, without texts and unknown values."""
    parts = {
        "cause": miss.cause,
        "cached": miss.cached,
        "lost": miss.lost,
        "token": miss.token,
        "message": miss.message,
        "role": miss.role,
    }
    return {name: part for name, part in parts.items() if part is not None}


class UsageWriter:
    """Rewrites the body of one response: a stream of events if `streamed`, else a JSON object."""

    def __init__(self, style: Style, exchange: Exchange, streamed: bool) -> None:
        self._details, self._exchange = _DETAILS[style], exchange
        self.streamed = streamed
        self._held = b""

    def write(self, piece: bytes, last: bool) -> bytes:
        """Takes a piece of the body; returns complete events, or the object at the end."""
        self._held += piece
        if last:
            end = len(self._held)
        else:
            end = self._held.rfind(_END) + len(_END) if self.streamed and _END in self._held else 0
        ready, self._held = self._held[:end], self._held[end:]
        if not self.streamed:
            return self._with_report(ready)
        return b"\n".join(map(self._line, ready.split(b"\n")))

    def _line(self, line: bytes) -> bytes:
        field, colon, value = line.partition(b": ")
        return field + colon + self._with_report(value) if field == b"data" else line

    def _with_report(self, text: bytes) -> bytes:
        """Adds the report to a JSON object with a usage; returns any other text unchanged."""
        # In the Responses API the miss is known only after the first events.
        miss = self._exchange.miss
        if miss is None or b'"usage"' not in text:
            return text
        try:
            answer = json.loads(text)
        except ValueError:
            return text
        for usage in _usages(answer):
            details = usage
            if self._details is not None:
                details = usage[self._details] = usage.get(self._details) or {}
            details[NAME] = report(miss)
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _usages(answer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(answer, dict):
        for part in (answer, *map(answer.get, _PARTS)):
            if isinstance(part, dict) and isinstance(part.get("usage"), dict):
                yield part["usage"]
