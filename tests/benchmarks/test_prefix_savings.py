# SPDX-License-Identifier: Apache-2.0
"""The comparison of benchmarks/prefix_savings.py, with fake engines."""

import itertools
from types import SimpleNamespace

import pytest
from _savings_runs import ANSWER, LONGEST, compare
from _shared import Prompts


class FakeEngine:
    """Takes a millisecond per token that is new at its position."""

    def __init__(self, remembers: bool) -> None:
        self._remembers = remembers
        self._seen: list[list[int]] = []
        self._numbers = itertools.count(1000)
        self.longest = 0

    def complete(self, prompt: list[int], max_tokens: int):
        common = max((_common(prompt, text) for text in self._seen), default=0)
        found = min(common, len(prompt) - 1) if self._remembers else 0
        tokens = list(itertools.islice(self._numbers, max_tokens))
        self._seen.append(prompt + tokens)
        self.longest = max(self.longest, len(prompt) + max_tokens)
        seconds = 0.001 * (len(prompt) - found)
        return SimpleNamespace(seconds=seconds, cached_tokens=found), tokens

    def flush(self) -> None: ...

    def forget(self) -> None:
        self._seen.clear()


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_what_a_cache_that_forgets_nothing_saves() -> None:
    off, on = FakeEngine(False), FakeEngine(True)
    savings = compare(off, on, Prompts(10**9), repeats=3)
    system_prompt, chat, documents = savings.values()
    assert off.longest == on.longest == LONGEST
    assert system_prompt.prompt_tokens == 8 * 550
    assert system_prompt.computed_share == pytest.approx((550 + 7 * 50) / (8 * 550))
    assert system_prompt.off_later_ms == pytest.approx(550)
    assert system_prompt.on_later_ms == pytest.approx(50)
    assert system_prompt.off_first_ms == system_prompt.on_first_ms == pytest.approx(550)
    assert chat.prompt_tokens == sum(150 * turn + ANSWER * (turn - 1) for turn in range(1, 5))
    assert chat.on_later_ms == pytest.approx(150)
    assert documents.later_ratio == pytest.approx(50 / 2050)
    assert documents.total_ratio == pytest.approx((2050 + 4 * 50) / (5 * 2050))
