# SPDX-License-Identifier: Apache-2.0
"""Chunk lengths on simulated machines: steps keep to their bound, and use it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_metal.patches.vllm_patches.chunk_lengths import ChunkLengths, StepWork

SHORTEST = 16
#: Seconds of a step: of decode rows, prefill tokens, and the context before these.
Machine = Callable[[int, int, int], float]


def adding(fixed: float, row: float, chunk: float, token: float, attention: float) -> Machine:
    """Models a chunk whose time adds to decoding."""

    def seconds(rows: int, tokens: int, context: int) -> float:
        of_chunk = chunk + tokens * (token + attention * context) if tokens else 0.0
        return fixed + row * rows + of_chunk

    return seconds


def overlapping(weights: float, token: float, attention: float) -> Machine:
    """Models a chunk that overlaps with reading weights: the longer time counts."""
    return lambda rows, tokens, context: max(weights, tokens * (token + attention * context))


MACHINES = {
    "fast": adding(5e-3, 1e-4, 2e-3, 2e-4, 2e-8),
    "fast, weights overlap": overlapping(20e-3, 8e-4, 5e-8),
    "slow": adding(100e-3, 5e-3, 10e-3, 1e-3, 1e-7),
    "slow, a costly chunk": adding(100e-3, 5e-3, 40e-3, 1e-3, 1e-7),
}


@dataclass
class Engine:
    """Plans steps knowing all but the last `lag` results, like async scheduling."""

    machine: Machine
    max_step_s: float = 0.06
    noise: float = 0.05
    lag: int = 1
    most: int = 2048
    seed: int = 0
    taken: list[tuple[StepWork, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = ChunkLengths(self.max_step_s, SHORTEST)
        self._rng = np.random.default_rng(self.seed)
        self._heard = 0

    def step(self, rows: int, tokens: int, context: int = 0, held_up: float = 0.0) -> float:
        seconds = self.machine(rows, tokens, context) * self._rng.lognormal(0, self.noise)
        self.taken.append((StepWork(rows, tokens, tokens * context), seconds + held_up))
        while self._heard < len(self.taken) - self.lag:
            self.lengths.observe(*self.taken[self._heard])
            self._heard += 1
        return seconds + held_up

    def alone(self, length: int) -> None:
        for start in range(0, length, self.most):
            self.step(0, min(self.most, length - start), start)

    def decode(self, rows: int, steps: int) -> None:
        for _ in range(steps):
            self.step(rows, 0)

    def beside(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps' seconds and chunks of a prompt beside this many decoding rows."""
        seconds, chunks, start = [], [], 0
        while start < length:
            limit = self.lengths.limit(rows, start)
            chunk = min(self.most, length - start, self.most if limit is None else limit)
            seconds.append(self.step(rows, chunk, start))
            chunks.append(chunk)
            start += chunk
        return np.array(seconds), np.array(chunks)

    def bound(self, rows: int) -> float:
        return max(self.max_step_s, 2 * self.machine(rows, 0, 0))


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", MACHINES)
def test_steps_keep_to_the_bound_and_use_it(name, lag):
    engine = Engine(MACHINES[name], lag=lag)
    engine.alone(600)
    engine.decode(1, 30)
    engine.beside(1, 8000)  # the first long prompt finds the lengths
    seconds, chunks = engine.beside(1, 8000)
    share = seconds[chunks > 0] / engine.bound(1)
    assert np.percentile(share, 99) < 1.35
    assert 0.85 < share.mean() < 1.1
    assert chunks.sum() == 8000


@pytest.mark.parametrize("name", MACHINES)
def test_the_first_long_prompt_is_within_the_bound_from_its_first_steps(name):
    """A short prompt's token seems expensive, so lengths grow from below."""
    engine = Engine(MACHINES[name])
    engine.alone(20)
    engine.decode(1, 10)
    seconds, chunks = engine.beside(1, 8000)
    assert (seconds / engine.bound(1)).max() < 1.8
    assert chunks[20:-1].mean() > 2 * SHORTEST


def test_a_bound_of_its_users():
    engine = Engine(MACHINES["fast"], max_step_s=0.2)
    engine.alone(2000)
    engine.decode(4, 10)
    engine.beside(4, 8000)
    seconds, _ = engine.beside(4, 8000)
    assert 0.17 < seconds.mean() < 0.22


def test_nothing_is_limited_before_anything_was_measured():
    assert ChunkLengths(0.06, SHORTEST).limit(3, 0) is None


def test_prefill_goes_on_where_nothing_fits():
    engine = Engine(adding(50e-3, 0.0, 200e-3, 20e-3, 0.0), max_step_s=0.06)
    engine.alone(100)
    engine.decode(1, 10)
    _, chunks = engine.beside(1, 2000)
    assert set(chunks[:-1].tolist()) <= {0, SHORTEST}
    assert (chunks == 0).mean() < 0.05


def test_steps_that_were_held_up_are_soon_forgotten():
    engine = Engine(MACHINES["fast"])
    engine.alone(2000)
    engine.decode(1, 10)
    engine.beside(1, 4000)
    _, before = engine.beside(1, 4000)
    limit = engine.lengths.limit(1, 1000)
    engine.step(1, limit, 1000, held_up=5.0)
    engine.step(1, 0, held_up=5.0)
    engine.step(1, 0)
    engine.step(1, 0)
    _, after = engine.beside(1, 4000)
    assert after[:2].sum() > 0.5 * before[:2].sum()
    assert len(after) < 1.25 * len(before)
    seconds, _ = engine.beside(1, 4000)
    assert np.percentile(seconds, 99) < 1.35 * engine.bound(1)


def test_the_lengths_follow_the_machine():
    engine = Engine(MACHINES["fast"])
    engine.alone(2000)
    engine.decode(1, 20)
    engine.beside(1, 4000)
    _, fast = engine.beside(1, 4000)
    engine.machine = adding(15e-3, 1e-4, 6e-3, 6e-4, 6e-8)  # it is hot: all takes three times
    engine.beside(1, 4000)
    seconds, slow = engine.beside(1, 4000)
    assert np.percentile(seconds, 90) < 1.35 * engine.bound(1)
    assert np.median(slow) < 0.5 * np.median(fast)
    engine.machine = MACHINES["fast"]
    engine.beside(1, 4000)
    _, again = engine.beside(1, 4000)
    assert np.median(again) > 0.8 * np.median(fast)


def test_what_decoding_takes_is_known_though_prompts_never_end():
    """Streams join one by one while prompts wait, so no step only decodes."""
    engine = Engine(MACHINES["slow"])
    engine.alone(200)
    for rows in (1, 2, 4, 8, 16, 32):
        engine.beside(rows, 1000)
    seconds, chunks = engine.beside(32, 4000)
    assert 0.85 < np.median(seconds[chunks > 0]) / engine.bound(32) < 1.15
    assert (chunks == 0).sum() <= 2 + len(chunks) // 64


def test_short_prompts_tell_nothing_of_long_ones():
    engine = Engine(MACHINES["fast"])
    engine.alone(2000)
    engine.decode(1, 20)
    engine.beside(1, 4000)
    limit = engine.lengths.limit(1, 0)
    for _ in range(40):
        engine.beside(1, 5)
    assert engine.lengths.limit(1, 0) == pytest.approx(limit, rel=0.15)


def test_a_chunk_that_seems_to_cost_nothing_does_not_lift_the_limit():
    """At a new context, a step with a chunk was faster than steps that only decode."""
    lengths = ChunkLengths(0.06, SHORTEST)
    lengths.observe(StepWork(0, 500, 0), 0.5)
    for _ in range(5):
        lengths.observe(StepWork(1), 0.02)
    known = lengths.limit(1, 0)
    lengths.observe(StepWork(1, known, known * 5000), 0.01)
    assert known == pytest.approx(40, abs=1)
    assert lengths.limit(1, 5000) <= 2 * known


def test_work_of_steps_adds_up():
    both = StepWork(3, 10, 10 * 100) + StepWork(1, 30, 30 * 200)
    assert both == StepWork(4, 40, 7000)
    assert both.context == 175
    assert StepWork(3).context == 0
