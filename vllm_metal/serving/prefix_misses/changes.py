# SPDX-License-Identifier: Apache-2.0
"""Names what differs in two texts that begin alike: a date, a counter, an identifier, an edit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Change = Literal["date", "identifier", "counter", "edit"]

#: Characters that both texts must have behind a change, to go on alike there.
_ALIKE = 8
_MONTHS = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\\.?"
_DAYS = "(?:mon|tue|wed|thu|fri|sat|sun)(?:day|sday|nesday|rsday|urday)?"
#: Parts of what clocks and calendars write.
_PARTS = "|".join(
    (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
        r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:\s?[ap]\.?m\b)?(?:Z|\s?[+-]\d\d:?\d\d)?",
        rf"\b{_DAYS}\b",
        rf"\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTHS}(?:,?\s+\d{{4}}\b)?",
        rf"\b{_MONTHS}\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}}\b)?",
        r"\b1[6-9]\d{8}(?:\d{3})?\b",  # seconds, or milliseconds, since 1970
    )
)
_DATE = rf"(?:{_PARTS})(?:(?:T|,?\s+(?:at\s+)?)(?:{_PARTS}))*"
#: The first of the patterns that covers a change names it.
_PATTERNS: tuple[tuple[Change, re.Pattern[str]], ...] = (
    ("date", re.compile(_DATE, re.IGNORECASE)),
    # A UUID; eight digits of hexadecimal or more; twelve letters and digits mixed.
    (
        "identifier",
        re.compile(
            r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
            r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"
            r"|\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9_-]{12,}\b",
            re.IGNORECASE,
        ),
    ),
    ("counter", re.compile(r"\d[\d,.]*")),
)


@dataclass(frozen=True)
class Difference:
    """The first place where a text is another one than before."""

    kind: Change
    before: str  # what stood there: a whole date, say
    now: str
    goes_on: bool  # whether both texts go on alike behind it


def first(before: str, now: str) -> Difference:
    """Names the first difference.

    Args:
        before, now: texts that begin alike, for some characters or none, and then do not.
    """
    start = _common(before, now)
    ends = _ends(before[start:], now[start:])
    goes_on = ends is not None
    spans = [(start, start + end) for end in ends or (len(before) - start, len(now) - start)]
    for kind, pattern in _PATTERNS:
        found = [
            next((m for m in pattern.finditer(text) if _covers(m, span)), None)
            for text, span in zip((before, now), spans, strict=True)
        ]
        if found[0] is not None and found[1] is not None:
            return Difference(kind, found[0][0], found[1][0], goes_on)
    (_, before_end), (_, now_end) = spans
    return Difference("edit", before[start:before_end], now[start:now_end], goes_on)


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _ends(before: str, now: str) -> tuple[int, int] | None:
    """Where both go on alike, after what differs; None: they do not."""
    places: dict[str, int] = {}
    for place in range(len(before) - _ALIKE + 1):
        places.setdefault(before[place : place + _ALIKE], place)
    for place in range(len(now) - _ALIKE + 1):
        found = places.get(now[place : place + _ALIKE])
        if found is not None:
            return found, place
    return None


def _covers(match: re.Match[str], span: tuple[int, int]) -> bool:
    return match.start() <= span[0] and span[1] <= match.end()
