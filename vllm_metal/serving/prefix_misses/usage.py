# SPDX-License-Identifier: Apache-2.0
"""Puts the report of a miss into an answer's usage, for a client that asked for it.

    "usage": {..., "prompt_tokens_details": {"prefix_cache_miss": {"cause": "date", "lost": 5120}}}

The report is put into the answer as vLLM wrote it: no client gets a field that it did not ask for,
and no answer is kept with one.
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
#: What has details of a prompt, in a usage; None: the usage itself.
_DETAILS: Mapping[Style, str | None] = MappingProxyType(
    {
        "chat": "prompt_tokens_details",
        "completion": "prompt_tokens_details",
        "responses": "input_tokens_details",
        "messages": None,
    }
)
#: What has the usage: an answer or a chunk itself, or the part of an event with the answer.
_PARTS = ("response", "message")
_END = b"\n\n"  # of an event


def report(miss: Miss) -> dict[str, str | int]:
    """The report as a JSON object, without the texts and what is not known."""
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
    """Takes the body of one answer in pieces, and returns what the client gets."""

    def __init__(self, style: Style, exchange: Exchange, streamed: bool) -> None:
        """
        Args:
            style: of the route.
            exchange: has the miss once it is known: behind the first events of a response.
            streamed: whether the body is a stream of events; else it is one JSON object.
        """
        self._details, self._exchange = _DETAILS[style], exchange
        self.streamed = streamed
        self._held = b""

    def write(self, piece: bytes, last: bool) -> bytes:
        """What can be sent: whole events, or the whole object behind its last piece.

        Args:
            piece: of the body.
            last: whether nothing comes behind it.
        """
        self._held += piece
        if last:
            end = len(self._held)
        else:
            end = self._held.rfind(_END) + len(_END) if self.streamed and _END in self._held else 0
        ready, self._held = self._held[:end], self._held[end:]
        if not self.streamed:
            return self._told(ready)
        return b"\n".join(map(self._line, ready.split(b"\n")))

    def _line(self, line: bytes) -> bytes:
        field, colon, value = line.partition(b": ")
        return field + colon + self._told(value) if field == b"data" else line

    def _told(self, text: bytes) -> bytes:
        """The JSON object with the report in it; any other text as it is."""
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
