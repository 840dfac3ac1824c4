# SPDX-License-Identifier: Apache-2.0
"""Times a prompt alone and beside a stream, on engines that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _kv_streams import Gaps, Stream
from _shared import Prompts, note

if TYPE_CHECKING:
    from _engine import Engine

STREAM_PROMPT = 60  # tokens
MOST_STREAMED = 4000  # tokens of the stream, more than there are steps


@dataclass
class Runs:
    """Times of one engine in seconds."""

    idle: list[float] = field(default_factory=list)  # between tokens of the stream alone
    beside: list[float] = field(default_factory=list)  # between tokens while a prompt is computed
    alone_rates: list[float] = field(default_factory=list)  # prompt tokens per second, per prompt
    beside_rates: list[float] = field(default_factory=list)

    def measure(self, engine: Engine, prompts: Prompts, length: int, idle_tokens: int) -> None:
        """Adds a run with prompts that are new to the engine."""
        engine.flush()
        engine.forget()
        self.alone_rates.append(length / engine.first_token(prompts.new(length)).seconds)
        engine.forget()
        stream = Stream(engine, prompts.new(STREAM_PROMPT), MOST_STREAMED)
        stream.tokens(idle_tokens, self.idle)
        name, others, started = engine.add(prompts.new(length)), set[str](), time.perf_counter()
        while name not in others:
            others = stream.token(self.beside)
        self.beside_rates.append(length / (time.perf_counter() - started))
        stream.stop()


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    idle_p50_ms: float
    idle_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    p99_ratio: float
    steps: float  # steps that a prompt took beside the stream
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    rate_ratio: float

    @staticmethod
    def of(runs: Runs) -> Result:
        """Computes percentiles of all gaps, and medians of rates."""
        idle, beside = Gaps.of(runs.idle), Gaps.of(runs.beside)
        rates = statistics.median(runs.alone_rates), statistics.median(runs.beside_rates)
        return Result(
            idle.p50,
            idle.p99,
            beside.p50,
            beside.p99,
            beside.p99 / idle.p99,
            beside.number / len(runs.beside_rates),
            *rates,
            rates[1] / rates[0],
        )


HEADERS = (
    "steps",
    "idle p50, ms",
    "idle p99",
    "beside p50",
    "beside p99",
    "p99, ratio",
    "steps a prompt",
    "alone, tok/s",
    "beside, tok/s",
    "rate, ratio",
)


def compare(
    engines: Mapping[str, Engine], prompts: Prompts, length: int, repeats: int, idle_tokens: int
) -> dict[str, Result]:
    """Returns results by engine; which engine is first alternates."""
    runs = {name: Runs() for name in engines}
    for engine in engines.values():
        engine.first_token(prompts.new(length // 8))
    for number in range(repeats):
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for name in order:
            runs[name].measure(engines[name], prompts, length, idle_tokens)
            note(f"{name}: {Result.of(runs[name])}")
    return {name: Result.of(of_engine) for name, of_engine in runs.items()}
