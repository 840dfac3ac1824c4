# SPDX-License-Identifier: Apache-2.0
"""Seeds one after the other: played, judged, and made small where they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from e2e.fuzz.judge import Judge, Problem
from e2e.fuzz.play import play
from e2e.fuzz.shrink import MOST_REPLAYS, Part, shrink
from e2e.fuzz.traffic import Run, Setting
from e2e.harness import Dense
from e2e.test_quantised_cache import TIE as TIE_OF_CODES
from e2e.test_quantised_cache import QuantisedDense

#: Two logits of the tiny models, which range over some 13, move by less than 1e-5 when batches sum
#: them in another order; next to each other they are some 1e-2 apart.
TIE = 1e-4
_COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "cached tokens": "vllm:prefix_cache_hits",
    "accepted drafts": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True)
class Failure:
    """What is wrong with a run, and the line that shows it again."""

    problem: Problem
    part: Part

    def __str__(self) -> str:
        return f"{self.problem.message}\n{reproduction(self.part)}"


def reproduction(part: Part) -> str:
    """The command, in the repository root, that plays a part of a run."""
    only = ",".join(map(str, part.only))
    without = f" --without {','.join(part.without)}" if part.without else ""
    return f"make fuzz FUZZ='{part.seed} --only {only}{without}'"


@dataclass
class Campaign:
    """Runs on models of one folder.

    totals: what the runs had of each thing that they are there to try; tie: see Judge.
    """

    models: Path
    tie: float = TIE
    totals: Counter[str] = field(default_factory=Counter)
    _judges: dict[tuple[str, str], Judge] = field(default_factory=dict)

    def examine(self, run: Run) -> Problem | None:
        """The first problem of a run, if there is one."""
        try:
            outcome = play(run, self.models)
        except Exception as error:
            return Problem(type(error).__name__, None, f"{type(error).__name__}: {error}")
        judge = self._judge(run.setting)
        before = judge.tokens, judge.ties
        problem = next(judge.problems(run, outcome), None)
        self.totals["requests"] += len(run.requests)
        self.totals["tokens"] += judge.tokens - before[0]
        self.totals["ties"] += judge.ties - before[1]
        self.totals["aborted"] += sum(served.aborted for served in outcome.served)
        self.totals["resets"] += len(outcome.resets)
        for name, counter in _COUNTERS.items():
            self.totals[name] += int(outcome.counters.get(counter, 0))
        return problem

    def first_failure(
        self,
        runs: Iterable[Run],
        progress: Callable[[Run], None] = lambda run: None,
        most_replays: int = MOST_REPLAYS,
    ) -> Failure | None:
        """Examines runs until one fails, which is then made small."""
        for run in runs:
            progress(run)
            if (problem := self.examine(run)) is not None:
                return self.explain(run, problem, most_replays)
        return None

    def explain(self, run: Run, problem: Problem, most_replays: int = MOST_REPLAYS) -> Failure:
        """A small part of a failing run, and what is wrong with that part."""
        newest = problem

        def fails(part: Run) -> bool:
            nonlocal newest
            found = self.examine(part)
            if found is None or found.kind != problem.kind:
                return False
            newest = found
            return True

        part = shrink(run, fails, problem.request, most_replays)
        return Failure(newest, part)

    def _judge(self, setting: Setting) -> Judge:
        key = setting.model, setting.kv_cache_dtype
        if key not in self._judges:
            folder = str(self.models / setting.model)
            if setting.kv_cache_dtype == "auto":
                self._judges[key] = Judge(folder, Dense(folder), self.tie)
            else:
                source = QuantisedDense(folder, setting.kv_cache_dtype)
                self._judges[key] = Judge(folder, source, TIE_OF_CODES)
        return self._judges[key]
