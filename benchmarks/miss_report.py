# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of explaining prefix cache misses, in microseconds by request length.

    python benchmarks/miss_report.py

A conversation is sent for the first time, then with another turn, then with its first line changed.
For comparison, measures Python's sum of equally many numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.prefix_misses.watch import Watch

_LENGTHS = (1_000, 10_000, 100_000)
_TURN = 1_000  # added per turn
_CHARACTERS = 4  # per token
_RUNS = 9


def main() -> None:
    """Prints the table."""
    print(
        f"{'tokens':>10}{'first':>10}{'next turn':>10}{'changed':>10}{'a sum':>10}   microseconds"
    )
    for length in _LENGTHS:
        times = [min(column) for column in zip(*(_run(length) for _ in range(_RUNS)), strict=True)]
        print(f"{length:>10}" + "".join(f"{1e6 * seconds:>10.0f}" for seconds in times))


def _run(length: int) -> list[float]:
    """Returns the seconds for each column."""
    watch = Watch(str, ServerMetrics(CollectorRegistry()).lost_tokens, 16)
    tokens = [random.randrange(150_000) for _ in range(length + _TURN)]
    changed = [7, *tokens]

    def ask(prompt: list[int], cached: int) -> float:
        messages = _messages(len(prompt))
        return _seconds(
            lambda: watch.on_first_token(watch.on_prompt(prompt, None, messages), cached)
        )

    return [
        ask(tokens[:length], 0),
        ask(tokens, length // 16 * 16),
        ask(changed, 0),
        _seconds(lambda: sum(tokens)),
    ]


def _messages(length: int) -> list[dict[str, str]]:
    """Returns a conversation of texts that have not been hashed yet."""
    return [
        {"role": "user", "content": f"{turn} {random.random()}" + "x" * _TURN * _CHARACTERS}
        for turn in range(length // _TURN)
    ]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
