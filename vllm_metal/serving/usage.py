# SPDX-License-Identifier: Apache-2.0
"""How many tokens an answer took, as the answer says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Compact JSON. Within a string its quotes would have a backslash, so it is always a key.
MARK = b'"usage":{'
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt: int  # all, cached ones too
    cached: int  # 0 where vLLM does not say it: --enable-prompt-tokens-details
    completion: int


def last_in(answer: bytes) -> Usage | None:
    """Of the last `usage` object in an answer, or in a part of one; None: there is none."""
    place = answer.rfind(MARK)
    if place < 0:
        return None
    start = place + len(MARK) - 1
    try:
        found, _ = _DECODER.raw_decode(answer[start:].decode(errors="replace"))
    except ValueError:  # cut off
        return None
    return _read(found)


def _read(usage: Mapping[str, Any]) -> Usage:
    """OpenAI's two ways to say it, and Anthropic's, whose input tokens leave out cached ones."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    apart = _number(usage, "cache_read_input_tokens")
    prompt = _number(usage, "prompt_tokens") or _number(usage, "input_tokens")
    return Usage(
        prompt=prompt + apart + _number(usage, "cache_creation_input_tokens"),
        cached=_number(details, "cached_tokens") or apart,
        completion=_number(usage, "completion_tokens") or _number(usage, "output_tokens"),
    )


def _number(where: Mapping[str, Any], key: str) -> int:
    value = where.get(key)
    return value if isinstance(value, int) else 0
