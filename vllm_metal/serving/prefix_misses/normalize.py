# SPDX-License-Identifier: Apache-2.0
"""Removes text that changes with each request from system messages, so that prompts share prefixes.

It removes only the kinds of text that the user lists, because the model's input changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

_ROLES = ("system", "developer")
_CLOCK = (
    r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:\s?[ap]\.?m\b)?(?:Z|\s?[+-]\d\d:?\d\d|\s+[A-Z]{3,4}\b)?"
)
#: Maps each kind to its pattern and replacement.
_PATTERNS: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType(
    {
        # Claude Code's first line: its version, and a hash of each request.
        "billing_header": (re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE), ""),
        # The client's count of remaining tokens, alone on a line or in tags.
        "token_countdown": (
            re.compile(
                r"^(?:<(\w+)>)?\s*(?:token usage: [\d,]+/[\d,]+; )?"
                r"[\d,]+ (?:tokens )?(?:left|remaining)\.?\s*(?:</\1>)?\n?",
                re.MULTILINE | re.IGNORECASE,
            ),
            "",
        ),
        # Times of day; the date stays.
        "times": (re.compile(rf"(?:(?<=\d)T|,?\s*(?:\bat\s+)?\b){_CLOCK}", re.IGNORECASE), ""),
        "uuids": (
            re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE),
            "00000000-0000-0000-0000-000000000000",
        ),
    }
)


def normalizer(names: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that removes these kinds of text from copies of JSON messages.

    Args:
        names: kinds of text, from settings.additional_config.NORMALIZED.
    """
    patterns = [_PATTERNS[name] for name in names]

    def normalize_text(text: str) -> str:
        for pattern, replacement in patterns:
            text = pattern.sub(replacement, text)
        return text

    def normalize_part(part: Any) -> Any:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": normalize_text(part["text"])}
        return part

    def normalize_message(message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": normalize_text(content)}
        if isinstance(content, list):
            return {**message, "content": [normalize_part(part) for part in content]}
        return message

    return lambda messages: [normalize_message(message) for message in messages]
