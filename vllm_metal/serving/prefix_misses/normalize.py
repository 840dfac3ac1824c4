# SPDX-License-Identifier: Apache-2.0
"""Takes out of system messages what changes with each request, so that prompts begin alike.

Only what the user lists is changed, as the model reads another text then.
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
#: What each name takes out, and what it leaves.
_PATTERNS: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType(
    {
        # Claude Code's first line: its version, and a hash of each request.
        "billing_header": (re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE), ""),
        # The tokens that a client says are left, alone in a line or in tags.
        "token_countdown": (
            re.compile(
                r"^(?:<(\w+)>)?\s*(?:token usage: [\d,]+/[\d,]+; )?"
                r"[\d,]+ (?:tokens )?(?:left|remaining)\.?\s*(?:</\1>)?\n?",
                re.MULTILINE | re.IGNORECASE,
            ),
            "",
        ),
        # Times of day; the day stays.
        "times": (re.compile(rf"(?:(?<=\d)T|,?\s*(?:\bat\s+)?\b){_CLOCK}", re.IGNORECASE), ""),
        "uuids": (
            re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE),
            "00000000-0000-0000-0000-000000000000",
        ),
    }
)


def normalizer(names: Sequence[str]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the texts of these names out of conversations.

    Args:
        names: of settings.additional_config.NORMALIZED.

    Returns:
        A function of messages, JSON objects: it leaves them as they are, and returns others.
    """
    patterns = [_PATTERNS[name] for name in names]

    def of_text(text: str) -> str:
        for pattern, left in patterns:
            text = pattern.sub(left, text)
        return text

    def of_part(part: Any) -> Any:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            return {**part, "text": of_text(part["text"])}
        return part

    def of_message(message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": of_text(content)}
        if isinstance(content, list):
            return {**message, "content": [of_part(part) for part in content]}
        return message

    return lambda messages: [of_message(message) for message in messages]
