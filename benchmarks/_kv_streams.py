# SPDX-License-Identifier: Apache-2.0
"""Measures time between a stream's tokens while pages are loaded or written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_metal.kv_transfer.disk.block_folder import BlockFolder
from vllm_metal.kv_transfer.disk.space import WriteResult

if TYPE_CHECKING:
    from _engine import Engine

_WARM_STEPS = 12


@dataclass(frozen=True)
class Gaps:
    """Times between tokens, milliseconds."""

    number: int
    p50: float
    p99: float
    longest: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Gaps:
        milliseconds = 1e3 * np.array(seconds)
        p50, p99 = np.percentile(milliseconds, (50, 99))
        return Gaps(len(seconds), float(p50), float(p99), float(milliseconds.max()))


class Stream:
    """A request that decodes until it is stopped."""

    def __init__(self, engine: Engine, prompt: Sequence[int], max_tokens: int) -> None:
        self._engine = engine
        self._name = engine.add(prompt, max_tokens)
        self._last = 0.0
        self.tokens(_WARM_STEPS, [])

    def tokens(self, number: int, gaps: list[float]) -> None:
        """Waits for `number` tokens, and appends the seconds before each to `gaps`."""
        for _ in range(number):
            self.token(gaps)

    def token(self, gaps: list[float]) -> set[str]:
        """Waits for a token; returns other requests that got one meanwhile."""
        others: set[str] = set()
        while True:
            got = set(self._engine.step())
            others |= got
            if self._name in got:
                break
        now = time.perf_counter()
        gaps.append(now - self._last)
        self._last = now
        return others - {self._name}

    def stop(self) -> None:
        """Stops the request."""
        self._engine.stop(self._name)


def beside_loads(
    engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, alone_tokens: int
) -> dict[str, object]:
    """Alternates a stream alone and beside loads; each round loads every long prompt once.

    Args:
        engine: must have room in memory for all prompts at once.
        prompts: prompts that are completely on disk.
        rounds: number of rounds.
        alone_tokens: tokens of the stream between two loads.

    Returns:
        Gaps: alone; while pages come in; and until the prompt is answered, which adds a step that
        computes the prompt's last tokens. Ratios of the 99th percentiles to that alone.
    """
    alone: list[float] = []
    loading: list[float] = []
    answering: list[float] = []
    hits = engine.counter("external_prefix_cache_hits")
    for number in range(rounds):
        engine.flush()
        engine.forget()
        length = len(prompts) * (alone_tokens + 400)
        stream = Stream(engine, [7 + number, *range(10, 70)], length)
        for prompt in prompts:
            stream.tokens(alone_tokens, alone)
            name, others = engine.add(prompt), set[str]()
            while name not in others:
                gap: list[float] = []
                others = stream.token(gap)
                # The step that finds all pages loaded also computes the prompt's last tokens.
                (loading if engine.is_loading(name) else answering).extend(gap)
        stream.stop()
    hits = engine.counter("external_prefix_cache_hits") - hits
    wanted = rounds * sum(len(prompt) - 16 for prompt in prompts)
    assert hits >= 0.9 * wanted, f"{hits:.0f} of {wanted} tokens were loaded"
    figures = {"alone": alone, "loading": loading, "with the answer": loading + answering}
    gaps = {name: Gaps.of(seconds) for name, seconds in figures.items()}
    return {
        "loads": rounds * len(prompts),
        "ms": {name: asdict(of_name) for name, of_name in gaps.items()},
        "p50_ratio": gaps["loading"].p50 / gaps["alone"].p50,
        "p99_ratio": gaps["loading"].p99 / gaps["alone"].p99,
        "p99_ratio_with_answer": gaps["with the answer"].p99 / gaps["alone"].p99,
    }


@contextmanager
def stuck_disk() -> Iterator[None]:
    """Makes every disk write wait and finally fail."""
    free = threading.Event()
    write = BlockFolder.write

    def wait(*_: object) -> WriteResult:
        free.wait()
        return WriteResult.FAILED

    BlockFolder.write = wait  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BlockFolder.write = write  # type: ignore[method-assign]
        free.set()


def beside_stuck_disk(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, object]:
    """Alternates a stream with the normal disk and with one that accepts nothing.

    Args:
        engine: any engine.
        prompts: new prompts; each fills the write queue, best with more than the staging
            memory.
        tokens: tokens of the stream each time.

    Returns:
        Gaps of both, and ratios to the normal disk.
    """
    free: list[float] = []
    stuck: list[float] = []
    for number, prompt in enumerate(prompts):
        engine.flush()
        stream = Stream(engine, [90 + number, *range(10, 70)], 2 * tokens + len(prompt) + 100)
        stream.tokens(tokens, free)
        with stuck_disk():
            name, others = engine.add(prompt), set[str]()
            while name not in others:
                others = stream.token([])
            stream.tokens(tokens, stuck)
        stream.stop()
    gaps = {"disk free": Gaps.of(free), "disk stuck": Gaps.of(stuck)}
    return {
        "ms": {name: asdict(of_name) for name, of_name in gaps.items()},
        "p50_ratio": gaps["disk stuck"].p50 / gaps["disk free"].p50,
        "p99_ratio": gaps["disk stuck"].p99 / gaps["disk free"].p99,
    }
