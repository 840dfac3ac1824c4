# SPDX-License-Identifier: Apache-2.0
"""The comparisons of benchmarks/serving.py, with fake clients."""

import pytest
from serving import RECIPES_REPEATS, measure_added, measure_hits, measure_repeats


class FakeClient:
    """Takes `ms` for a new request, and `hit_ms` for a repeated one."""

    def __init__(self, ms: float, hit_ms: float) -> None:
        self._ms, self._hit_ms = ms, hit_ms
        self.asked: list[str] = []

    def ask(self, text: str, max_tokens: int) -> tuple[float, str]:
        known = text in self.asked
        self.asked.append(text)
        return (self._hit_ms, "HIT") if known else (self._ms * max_tokens, "MISS")


def test_new_requests_are_the_same_for_both_and_asked_once():
    plain, gated = FakeClient(5.0, 0.0), FakeClient(6.5, 0.0)
    found = measure_added(plain, gated, 50)
    assert (found.without, found.with_it, found.added) == (5.0, 6.5, 1.5)
    assert plain.asked == gated.asked and len(set(plain.asked)) == 50


def test_a_kept_answer_is_compared_with_itself():
    found = measure_hits(FakeClient(2.0, 4.0), 5, 200)
    assert (found.computed, found.kept, found.faster) == (400.0, 4.0, 100.0)


def test_the_share_of_repeats_is_the_recipes():
    plain, gated = FakeClient(1.0, 10.0), FakeClient(1.0, 0.0)
    found = measure_repeats(plain, gated, 500, 10)
    assert found.share == pytest.approx(RECIPES_REPEATS)
    assert plain.asked == gated.asked
    assert found.gain == pytest.approx(1 / (1 - found.share))
