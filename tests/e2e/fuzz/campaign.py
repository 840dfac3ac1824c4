# SPDX-License-Identifier: Apache-2.0
"""Runs seeds one after another, judges them, and reduces failures."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from e2e.disk import Watch, pages
from e2e.fuzz.judge import Judge, Problem
from e2e.fuzz.play import Disk, Outcome, play
from e2e.fuzz.shrink import MOST_REPLAYS, Part, shrink
from e2e.fuzz.traffic import CACHES, Run, Setting
from e2e.harness import Dense
from e2e.test_quantized_cache import TIE as TIE_OF_CODES
from e2e.test_quantized_cache import QuantizedDense

#: Logits of the tiny models, with a range of about 13, change by less than 1e-5 with the batch's
#: summation order; adjacent ones are about 1e-2 apart.
TIE = 1e-4
_COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "cached tokens": "vllm:prefix_cache_hits",
    "accepted drafts": "vllm:spec_decode_num_accepted_tokens",
    "tokens from disk": "vllm:external_prefix_cache_hits",
    "evicted files": "vllm:prefix_cache_disk_evicted",
    "bad files": "vllm:prefix_cache_disk_corrupt",
}
#: Disk limits in bytes, by seed in turn: a few pages of a run, or all. A page
#: takes 8 KiB, or twice that in blocks of 32.
LIMITS = (200_000, 600_000, 1 << 30)
#: One in this many seeds is first run by a process that is killed while writing.
KILLED_OF = 10


@dataclass(frozen=True)
class Failure:
    """A failing run's problem, and the command that reproduces it."""

    problem: Problem
    part: Part
    disk: bool = False

    def __str__(self) -> str:
        return f"{self.problem.message}\n{reproduction(self.part, self.disk)}"


def reproduction(part: Part, disk: bool = False) -> str:
    """Returns the command, for the repository root, that runs a part of a run."""
    only = ",".join(map(str, part.only))
    without = f" --without {','.join(part.without)}" if part.without else ""
    on_disk = " --disk" if disk else ""
    return f"make fuzz FUZZ='{part.seed} --only {only}{without}{on_disk}'"


def _limit(seed: int) -> int:
    """Returns one of LIMITS; each occurs with each of CACHES, which also take turns by seed."""
    return LIMITS[(seed + seed // len(CACHES)) % len(LIMITS)]


def key_in(folder: str) -> Path:
    """Writes a server's secret into a file."""
    key = Path(folder) / "key"
    key.write_text("0123456789abcdef" * 2)
    key.chmod(0o600)
    return key


@dataclass
class Campaign:
    """Runs on the models of one folder.

    totals: counts of everything that the runs should cover; tie: see Judge. disk:
    whether each run is played by two engines in sequence that share a disk prefix cache; kills:
    whether some runs are first played by a process that is killed.
    """

    models: Path
    tie: float = TIE
    disk: bool = False
    kills: bool = False
    totals: Counter[str] = field(default_factory=Counter)
    _judges: dict[tuple[str, str], Judge] = field(default_factory=dict)

    def examine(self, run: Run) -> Problem | None:
        """Returns a run's first problem, or None."""
        if not self.disk:
            return self._examine(run, None, None)
        with tempfile.TemporaryDirectory() as scratch:
            disk = Disk(Path(scratch) / "cache", _limit(run.seed), key_in(scratch))
            with Watch(disk.folder) as watch:
                if self._kills(run):
                    self._kill_one(run, disk)
                outcomes: list[Outcome] = []
                for _ in range(2):
                    if problem := self._examine(run, disk, outcomes):
                        return problem
            if watch.peak > disk.max_bytes:
                kind = "bytes on disk"
                return Problem(kind, None, f"{watch.peak} bytes of {disk.max_bytes} on disk")
            return None

    def _kills(self, run: Run) -> bool:
        return self.kills and run.seed % KILLED_OF == 0

    def _kill_one(self, run: Run, disk: Disk) -> None:
        """Plays the run in a process, and kills it after it has written some files."""
        options = [str(run.seed), "--disk-folder", str(disk.folder), str(disk.max_bytes)]
        process = subprocess.Popen(
            [sys.executable, "-m", "e2e.fuzz", *options, str(disk.key)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        enough = random.Random(run.seed).randrange(2, 40)
        while process.poll() is None and len(pages(disk.folder)) < enough:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        self.totals["killed"] += process.wait() == -signal.SIGKILL

    def _examine(
        self, run: Run, disk: Disk | None, outcomes: list[Outcome] | None
    ) -> Problem | None:
        try:
            outcome = play(run, self.models, disk)
        except Exception as error:
            return Problem(type(error).__name__, None, f"{type(error).__name__}: {error}")
        judge = self._judge(run.setting)
        before = judge.tokens, judge.ties
        killed = disk is not None and self._kills(run)
        # Other models store only some blocks of a text; a draft model, all but the last.
        kept = disk is not None and disk.max_bytes == LIMITS[-1] and not killed
        kept = kept and run.setting.model == "full" and run.setting.method != "draft_model"
        problem = next(judge.problems(run, outcome, outcomes, killed, kept), None)
        if outcomes is not None:
            outcomes.append(outcome)
        self.totals["requests"] += len(run.requests)
        self.totals["tokens"] += judge.tokens - before[0]
        self.totals["ties"] += judge.ties - before[1]
        self.totals["aborted"] += sum(served.aborted for served in outcome.served)
        self.totals["resets"] += len(outcome.resets)
        self.totals["prompts in chunks"] += sum(
            len(served.prompt) - (served.cached or 0) > run.setting.max_num_batched_tokens
            for served in outcome.served
        )
        for name, counter in _COUNTERS.items():
            self.totals[name] += int(outcome.counters.get(counter, 0))
        return problem

    def first_failure(
        self,
        runs: Iterable[Run],
        progress: Callable[[Run], None] = lambda run: None,
        most_replays: int = MOST_REPLAYS,
    ) -> Failure | None:
        """Examines runs until one fails; reduces that one."""
        for run in runs:
            progress(run)
            if (problem := self.examine(run)) is not None:
                return self.explain(run, problem, most_replays)
        return None

    def explain(self, run: Run, problem: Problem, most_replays: int = MOST_REPLAYS) -> Failure:
        """Reduces a failing run to a small part; returns that part's problem."""
        newest = problem

        def fails(part: Run) -> bool:
            nonlocal newest
            found = self.examine(part)
            if found is None or found.kind != problem.kind:
                return False
            newest = found
            return True

        part = shrink(run, fails, problem.request, most_replays)
        return Failure(newest, part, self.disk)

    def _judge(self, setting: Setting) -> Judge:
        key = setting.model, setting.kv_cache_dtype
        if key not in self._judges:
            folder = str(self.models / setting.model)
            if setting.kv_cache_dtype == "auto":
                self._judges[key] = Judge(folder, Dense(folder), self.tie)
            else:
                source = QuantizedDense(folder, setting.kv_cache_dtype)
                self._judges[key] = Judge(folder, source, TIE_OF_CODES)
        return self._judges[key]
