# SPDX-License-Identifier: Apache-2.0
"""Classifies the first difference of two texts: a date, a counter, an identifier, or an edit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Change = Literal["date", "identifier", "counter", "edit"]

#: Equal characters after a change from which on both texts count as matching again.
_MATCH = 8
_MONTHS = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\\.?"
_DAYS = "(?:mon|tue|wed|thu|fri|sat|sun)(?:day|sday|nesday|rsday|urday)?"
#: Parts of dates and times.
_PARTS = "|".join(
    (
        r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}",
        r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}",
        r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:\s?[ap]\.?m\b)?(?:Z|\s?[+-]\d\d:?\d\d)?",
        rf"\b{_DAYS}\b",
        rf"\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTHS}(?:,?\s+\d{{4}}\b)?",
        rf"\b{_MONTHS}\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}}\b)?",
        r"\b1[6-9]\d{8}(?:\d{3})?\b",  # Unix time in seconds or milliseconds
    )
)
_DATE = rf"(?:{_PARTS})(?:(?:T|,?\s+(?:at\s+)?)(?:{_PARTS}))*"
#: Patterns by kind; the first one that covers a change decides.
_PATTERNS: tuple[tuple[Change, re.Pattern[str]], ...] = (
    ("date", re.compile(_DATE, re.IGNORECASE)),
    # A UUID; 8 or more hexadecimal digits; 12 or more letters and digits, mixed.
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
    """The first difference of two texts."""

    kind: Change
    before: str  # replaced text, such as a whole date
    now: str
    matches_after: bool  # whether both texts match again after it


def first(before: str, now: str) -> Difference:
    """Finds the first difference of two texts, which may have a common prefix."""
    start = _common_length(before, now)
    ends = _find_match(before[start:], now[start:])
    matches_after = ends is not None
    spans = [(start, start + end) for end in ends or (len(before) - start, len(now) - start)]
    for kind, pattern in _PATTERNS:
        found = [
            next((m for m in pattern.finditer(text) if _covers(m, span)), None)
            for text, span in zip((before, now), spans, strict=True)
        ]
        if found[0] is not None and found[1] is not None:
            return Difference(kind, found[0][0], found[1][0], matches_after)
    (_, before_end), (_, now_end) = spans
    return Difference("edit", before[start:before_end], now[start:now_end], matches_after)


def _common_length(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _find_match(before: str, now: str) -> tuple[int, int] | None:
    """Finds where two texts match again: returns the index in each, or None."""
    starts: dict[str, int] = {}
    for start in range(len(before) - _MATCH + 1):
        starts.setdefault(before[start : start + _MATCH], start)
    for start in range(len(now) - _MATCH + 1):
        found = starts.get(now[start : start + _MATCH])
        if found is not None:
            return found, start
    return None


def _covers(match: re.Match[str], span: tuple[int, int]) -> bool:
    return match.start() <= span[0] and span[1] <= match.end()
