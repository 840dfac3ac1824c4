# SPDX-License-Identifier: Apache-2.0
"""Sends requests to peers in turn, and compares the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from _peers_process import Run

OURS, MLX_LM, VLLM_CPU = "vllm-metal", "mlx-lm", "vLLM CPU"
SHARED, UNRELATED, ONE = "shared", "unrelated", "one"
#: Prefix cache states; the last two are mlx-lm's.
COLD, WARM, NONE, GIVEN = "cold", "warm", "no cache", "prefix given"
_AGREED_TOKENS = 16
# Token ids for random prompts: all except the leading control tokens.
_FIRST_TOKEN = 100
_POLL_S = 0.25
_IDLE_SHARE = 0.1  # of one core; systems count CPU time in steps of 0.01 s

Each = TypeVar("Each")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; lengths in tokens, of messages in words."""

    streams: int = 16
    shared: int = 512
    own: int = 64
    unrelated: int = 128
    output: int = 64
    turns: int = 10
    message: int = 60
    answer: int = 48

    def longest(self) -> int:
        """Tokens of the longest request outside the chat."""
        return max(self.shared + self.own, self.unrelated) + max(self.output, _AGREED_TOKENS)

    def longest_chat(self) -> int:
        """Upper bound of the chat's tokens: two per word, plus the template."""
        return 256 + self.turns * (2 * self.message + self.answer + 32)


QUICK = Sizes(
    streams=8, shared=256, own=32, unrelated=64, output=16, turns=10, message=24, answer=8
)


class Asked(Protocol):
    """The peer interface that a turn uses (`_peers_process.Peer`)."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, **arguments: object) -> Run:
        """Answers requests that are sent at once."""

    def ask(self, method: str, **arguments: object) -> object:
        """Returns the result of the engine's method."""

    def cpu_seconds(self) -> float:
        """CPU time of all its processes."""


def prompts_of(part: str, sizes: Sizes, vocabulary: int, seed: int) -> list[list[int]]:
    """Returns a part's prompts; equal seeds give equal prompts."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> list[int]:
        return rng.integers(_FIRST_TOKEN, vocabulary, length).tolist()

    if part == SHARED:
        beginning = text(sizes.shared)
        return [beginning + text(sizes.own) for _ in range(sizes.streams)]
    return [text(sizes.unrelated) for _ in range(sizes.streams if part == UNRELATED else 1)]


def turn(peer: Asked, part: str, prompts: list[list[int]], sizes: Sizes) -> dict[str, Run]:
    """Runs a peer's turn; returns results by prefix cache state."""
    if peer.name == MLX_LM:
        runs = {NONE: peer.run(prompts, sizes.output)}
        if part == SHARED:
            runs[GIVEN] = peer.run(prompts, sizes.output, shared=sizes.shared)
        return runs
    peer.ask("forget")
    runs = {COLD: peer.run(prompts, sizes.output)}
    if part == SHARED:
        runs[WARM] = peer.run(prompts, sizes.output)
    return runs


@dataclass(frozen=True)
class Figures:
    """Metrics of one run."""

    tokens_per_s: float  # output tokens
    ttft_ms: float  # mean of the requests
    tpot_ms: float  # median of the requests

    @classmethod
    def of(cls, run: Run) -> Figures:
        """Computes the metrics of a run whose answers have at least two tokens."""
        gaps = [
            (last - first) / (len(tokens) - 1)
            for first, last, tokens in zip(run.first, run.last, run.tokens, strict=True)
        ]
        return cls(run.throughput, 1e3 * statistics.mean(run.first), 1e3 * statistics.median(gaps))


#: Results of a part by peer and state, one per repeat.
Measured = dict[str, dict[str, list[Figures]]]


def median(runs: Sequence[Figures]) -> Figures:
    """Returns the median of each metric."""
    return Figures(
        *(statistics.median(getattr(run, name) for run in runs) for name in Figures.__annotations__)
    )


def in_turn(peers: Sequence[Each], repeats: int) -> Iterator[tuple[int, Each]]:
    """Yields repeats in rotating order: A B C, B C A, C A B."""
    for repeat in range(repeats):
        first = repeat % len(peers)
        for peer in (*peers[first:], *peers[:first]):
            yield repeat, peer


def await_idle(peers: Sequence[Asked]) -> None:
    """Waits until no peer uses the CPU, for at most ten seconds.

    vLLM's workers poll for another step for a second before they sleep.
    """
    for _ in range(round(10 / _POLL_S)):
        before = sum(peer.cpu_seconds() for peer in peers)
        time.sleep(_POLL_S)
        if sum(peer.cpu_seconds() for peer in peers) - before <= _IDLE_SHARE * _POLL_S:
            return


class IdleMeter:
    """Measures the CPU time that idle peers use during another peer's turn."""

    def __init__(self, peers: Sequence[Asked]) -> None:
        self._peers = peers
        self.share = 0.0  # of one core, in the worst turn

    def during(self, peer: Asked, do: Callable[[], dict[str, Run]]) -> dict[str, Run]:
        """Runs `do` as the turn of `peer`; returns its result."""
        others = [other for other in self._peers if other is not peer]
        started, before = time.perf_counter(), [other.cpu_seconds() for other in others]
        runs = do()
        seconds = time.perf_counter() - started
        taken = sum(other.cpu_seconds() for other in others) - sum(before)
        self.share = max(self.share, taken / seconds)
        return runs


def measure(
    part: str,
    peers: Sequence[Asked],
    sizes: Sizes,
    repeats: int,
    vocabulary: int,
    note: Callable[[str], None],
) -> tuple[Measured, float]:
    """Returns a part's metrics, and the share of `IdleMeter`.

    Each peer first answers equally many requests of half the length, so that the measurement
    includes no first-time work.
    """
    for peer in peers:
        warm = prompts_of(part, sizes, vocabulary, seed=1000)
        peer.run([prompt[len(prompt) // 2 :] for prompt in warm], 4)
    found: Measured = {}
    meter = IdleMeter(peers)
    for repeat, peer in in_turn(peers, repeats):
        prompts = prompts_of(part, sizes, vocabulary, seed=repeat)
        await_idle(peers)
        runs = meter.during(peer, lambda p=peer, q=prompts: turn(p, part, q, sizes))
        for state, run in runs.items():
            found.setdefault(peer.name, {}).setdefault(state, []).append(Figures.of(run))
            note(f"{part} {repeat + 1}/{repeats}, {peer.name} {state}: {run.throughput:.1f} tok/s")
    return found, meter.share


def agreement(peers: Sequence[Asked], prompt: list[int]) -> dict[str, list[int]]:
    """Returns the first tokens of each peer's greedy answer: alone, in a batch, after a prefix.

    All values should be equal.
    """
    half = len(prompt) // 2
    answers = {}
    for peer in peers:
        answers[peer.name] = peer.run([prompt], _AGREED_TOKENS).tokens[0]
        beside = peer.run([prompt, prompt[:half]], _AGREED_TOKENS)
        answers[f"{peer.name}, in a batch"] = beside.tokens[0]
        if peer.name == MLX_LM:  # the others find prefixes themselves
            given = peer.run([prompt, prompt], _AGREED_TOKENS, shared=half)
            answers[f"{peer.name}, {GIVEN}"] = given.tokens[1]
    return answers


@dataclass(frozen=True)
class Comparison:
    """Compares our engine with a peer."""

    part: str
    ours: str  # state
    peer: str
    theirs: str  # state
    goal: float | None = None  # throughput ratio at full size


COMPARISONS = (
    Comparison(SHARED, WARM, MLX_LM, NONE, 8.0),
    Comparison(SHARED, WARM, MLX_LM, GIVEN),
    Comparison(SHARED, COLD, MLX_LM, NONE),
    Comparison(SHARED, WARM, VLLM_CPU, WARM, 0.8),
    Comparison(SHARED, COLD, VLLM_CPU, COLD),
    Comparison(UNRELATED, COLD, MLX_LM, NONE, 1.5),
    Comparison(UNRELATED, COLD, VLLM_CPU, COLD, 0.7),
    Comparison(ONE, COLD, MLX_LM, NONE, 1.3),
    Comparison(ONE, COLD, VLLM_CPU, COLD, 0.7),
)


def compare(part: str, found: Mapping[str, Mapping[str, Sequence[Figures]]]) -> list[dict]:
    """Returns a part's comparisons: ratios of our medians to the peer's."""
    rows = []
    for each in COMPARISONS:
        if each.part != part or each.peer not in found:
            continue
        pairs = list(zip(found[OURS][each.ours], found[each.peer][each.theirs], strict=True))
        ratios = {
            name: statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
            for name in Figures.__annotations__
        }
        rows.append(
            {"ours": each.ours, "peer": each.peer, "theirs": each.theirs, "goal": each.goal}
            | ratios
        )
    return rows
