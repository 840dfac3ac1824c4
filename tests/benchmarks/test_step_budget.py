# SPDX-License-Identifier: Apache-2.0
"""The comparison of benchmarks/step_budget.py, with a fake engine."""

from types import SimpleNamespace

import pytest
from _budget_runs import compare
from _shared import Prompts


class FakeEngine:
    """Takes `step_s` per stream token, and computes `chunk` prompt tokens per step."""

    def __init__(self, clock: list[float], chunk: int) -> None:
        self._clock, self._chunk = clock, chunk
        self._number, self._stream, self._left = 0, "", {}

    def add(self, prompt: list[int], max_tokens: int = 1) -> str:
        self._number += 1
        name = str(self._number)
        if max_tokens > 1:
            self._stream = name
        else:
            self._left[name] = len(prompt)
        return name

    def step(self) -> dict[str, int]:
        self._clock[0] += 0.01
        for name in self._left:
            self._clock[0] += 0.001 * min(self._chunk, self._left[name])
            self._left[name] -= self._chunk
        done = [name for name, left in self._left.items() if left <= 0]
        for name in done:
            del self._left[name]
        return dict.fromkeys([self._stream, *done], 1)

    def first_token(self, prompt: list[int]) -> SimpleNamespace:
        return SimpleNamespace(seconds=0.001 * len(prompt))

    def flush(self) -> None: ...

    def forget(self) -> None: ...

    def stop(self, name: str) -> None: ...


def test_gaps_and_rates_with_and_without_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engines = {"long": FakeEngine(now, 400), "short": FakeEngine(now, 10)}
    found = compare(engines, Prompts(100), 800, repeats=2, idle_tokens=20)
    for result in found.values():
        assert result.idle_p99_ms == pytest.approx(10)
        assert result.alone_tokens_per_s == pytest.approx(1000)
    assert found["long"].beside_p99_ms == pytest.approx(410)
    assert found["long"].steps == 2
    assert found["long"].rate_ratio == pytest.approx(800 / 0.82 / 1000)
    assert found["short"].p99_ratio == pytest.approx(2)
    assert found["short"].steps == 80
    assert found["short"].rate_ratio == pytest.approx(0.5)
