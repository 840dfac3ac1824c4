# SPDX-License-Identifier: Apache-2.0
"""Plays workloads with shared prefixes on engines that take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _shared import Prompts, note

if TYPE_CHECKING:
    from _engine import Answer, Engine

ANSWER = 32  # tokens
New = Callable[[int], list[int]]  # returns a new text of this many tokens
Ask = Callable[[list[int]], list[int]]  # returns the answer to a prompt


def system_prompt(new: New, ask: Ask) -> None:
    """Eight users of one assistant: 500 tokens of instructions, then 50 of their own."""
    instructions = new(500)
    for _ in range(8):
        ask(instructions + new(50))


def chat(new: New, ask: Ask) -> None:
    """A chat of four turns, each with the whole history."""
    said: list[int] = []
    for _ in range(4):
        said += new(150)
        said += ask(said)


def documents(new: New, ask: Ask) -> None:
    """Five questions of 50 tokens about the same 2,000 tokens of documents."""
    context = new(2000)
    for _ in range(5):
        ask(context + new(50))


#: By name in the table.
WORKLOADS: Mapping[str, Callable[[New, Ask], None]] = {
    "system prompt, 8 × (500 + 50)": system_prompt,
    "chat, 4 turns of 150": chat,
    "documents, 5 × (2000 + 50)": documents,
}
LONGEST = 2000 + 50 + ANSWER


@dataclass
class Runs:
    """Measurements of one engine and workload."""

    prompts: list[int] = field(default_factory=list)  # tokens of each request
    cached: list[int] = field(default_factory=list)  # cached tokens of each request
    first_s: list[float] = field(default_factory=list)  # time to first token of first requests
    later_s: list[float] = field(default_factory=list)  # time to first token of later requests
    total_s: list[float] = field(default_factory=list)  # summed over the requests of each run

    def add(self, prompts: list[int], answers: list[Answer]) -> None:
        """Adds a run."""
        seconds = [answer.seconds for answer in answers]
        self.prompts += prompts
        self.cached += [answer.cached_tokens for answer in answers]
        self.first_s.append(seconds[0])
        self.later_s += seconds[1:]
        self.total_s.append(sum(seconds))


@dataclass(frozen=True)
class Saving:
    """A table row: the engine with the prefix cache, compared to the one without."""

    prompt_tokens: int  # per run
    computed_share: float  # share of prompt tokens computed with the cache on
    off_first_ms: float  # median time to first token of first requests
    on_first_ms: float
    off_later_ms: float  # of later requests
    on_later_ms: float
    later_ratio: float
    total_ratio: float  # total waiting time per run, median over runs

    @staticmethod
    def of(off: Runs, on: Runs) -> Saving:
        """Computes the savings from equally many alternating runs."""
        later = statistics.median(off.later_s), statistics.median(on.later_s)
        totals = [with_ / without for without, with_ in zip(off.total_s, on.total_s, strict=True)]
        return Saving(
            prompt_tokens=sum(on.prompts) // len(on.total_s),
            computed_share=1 - sum(on.cached) / sum(on.prompts),
            off_first_ms=1000 * statistics.median(off.first_s),
            on_first_ms=1000 * statistics.median(on.first_s),
            off_later_ms=1000 * later[0],
            on_later_ms=1000 * later[1],
            later_ratio=later[1] / later[0],
            total_ratio=statistics.median(totals),
        )


HEADERS = (
    "workload",
    "prompt tokens",
    "computed",
    "first TTFT off, ms",
    "on",
    "later TTFT off, ms",
    "on",
    "later, on / off",
    "all, on / off",
)


def run(engine: Engine, workload: Callable[[New, Ask], None], new: New, into: Runs) -> None:
    """Plays a workload on an engine with an empty cache."""
    engine.flush()
    engine.forget()
    prompts: list[int] = []
    answers: list[Answer] = []

    def ask(prompt: list[int]) -> list[int]:
        answer, tokens = engine.complete(prompt, ANSWER)
        prompts.append(len(prompt))
        answers.append(answer)
        return tokens

    workload(new, ask)
    into.add(prompts, answers)


def compare(off: Engine, on: Engine, prompts: Prompts, repeats: int) -> dict[str, Saving]:
    """Returns savings by workload; which engine is first alternates."""
    for engine in (off, on):
        engine.complete(prompts.new(100), ANSWER)
    savings = {}
    for name, workload in WORKLOADS.items():
        runs = Runs(), Runs()
        for number in range(repeats):
            in_turn = [(off, runs[0]), (on, runs[1])]
            for engine, of_engine in in_turn[:: -1 if number % 2 else 1]:
                run(engine, workload, prompts.new, of_engine)
            note(f"{name}: {Saving.of(*runs)}")
        savings[name] = Saving.of(*runs)
    return savings
