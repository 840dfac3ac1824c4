# SPDX-License-Identifier: Apache-2.0
"""Random steps of requests with drafts, and their naive token-by-token results."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from metal_kernels.sequences import COLUMNS

Row = tuple[np.ndarray, ...]  # one token's inputs


class Cell(Protocol):
    """A layer's rule for one token, float64."""

    def zero(self) -> np.ndarray:
        """Returns the initial state."""

    def apply(self, state: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Returns the state after the row, and the row's output."""


@dataclass
class Request:
    """A request between two steps."""

    settled: int = 0  # tokens in its state
    block: int = 0  # block of its state
    drafts: int = 0  # drafts of the previous step
    kept_at: int = 0
    state: np.ndarray | None = None
    kept: list[Row] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A request's part of a step."""

    certain: int
    drafts: int = 0
    accepted: int = 0  # accepted drafts of the previous step
    writes: bool = True


@dataclass(frozen=True)
class Step:
    """Arguments of a plan, and their requests."""

    requests: list[Request]
    turns: list[Turn]
    table_np: np.ndarray
    blocks_np: np.ndarray
    block_size: int
    num_rows: int
    num_kept: int
    num_kept_before: int
    bounds_np: np.ndarray

    @property
    def arguments(self) -> tuple:
        return (
            self.table_np,
            self.blocks_np,
            self.block_size,
            self.num_rows,
            self.num_kept,
            self.num_kept_before,
            self.bounds_np,
        )


class Traffic:
    """Requests that continue from step to step; `nulls`: some of their full blocks are null."""

    def __init__(self, rng: np.random.Generator, block_size: int, nulls: float = 0.3) -> None:
        self.rng, self.block_size, self.nulls = rng, block_size, nulls
        self.num_blocks = 1
        self.num_kept = 0

    def step(self, requests: list[Request], turns: list[Turn]) -> Step:
        """Makes a step of the requests, with unused rows and kept rows between them."""
        num = len(requests)
        table_np = np.zeros((num, COLUMNS), np.int32)
        blocks_np = np.zeros((num, 64), np.int32)
        row, kept = 0, 0
        for index, (request, turn) in enumerate(zip(requests, turns, strict=True)):
            last = request.settled + turn.accepted + turn.certain - 1
            write = self._blocks(request, last) if turn.writes else 0
            for column, block in request.blocks.items():
                blocks_np[index, column] = block
            rows = turn.certain + turn.drafts
            table_np[index] = (
                row, rows, turn.certain, request.kept_at, turn.accepted,
                request.settled, request.block, write, kept,
            )  # fmt: skip
            row, kept = row + rows, kept + turn.drafts
        bounds_np = np.array([request.drafts for request in requests])
        before, self.num_kept = self.num_kept, max(kept, 1)
        return Step(
            requests, turns, table_np, blocks_np, self.block_size, row, self.num_kept, before,
            bounds_np,
        )  # fmt: skip

    def _blocks(self, request: Request, last: int) -> int:
        """Allocates the request's blocks up to a token's; returns that token's, never null."""
        for column in range(max(last, 0) // self.block_size + 1):
            if column not in request.blocks:
                null = self.rng.random() < self.nulls
                request.blocks[column] = 0 if null else self._block()
        column = max(last, 0) // self.block_size
        return request.blocks[column] or self._block()

    def _block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1


def play(step: Step, cell: Cell, rows: list[Row]) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Plays a step token by token: returns its outputs, and the state that each block gets."""
    outputs: list[np.ndarray] = []
    ends: dict[int, np.ndarray] = {}
    for index, (request, turn) in enumerate(zip(step.requests, step.turns, strict=True)):
        state = cell.zero() if request.settled == 0 else request.state
        assert state is not None
        first, _, _, _, _, position, _, write, kept_at = step.table_np[index].tolist()
        own = rows[first : first + turn.certain + turn.drafts]
        for at, row in enumerate(request.kept[: turn.accepted] + own[: turn.certain]):
            state, output = cell.apply(state, row)
            if at >= turn.accepted:
                outputs.append(output)
            column, lag = divmod(position + at + 1, step.block_size)
            if lag == 0 and step.blocks_np[index, column - 1]:
                ends[int(step.blocks_np[index, column - 1])] = state
        if write:
            ends[write] = state
        request.state, request.kept, request.kept_at = state, own[turn.certain :], kept_at
        request.settled, request.block = position + turn.accepted + turn.certain, write
        request.drafts = turn.drafts
        for row in request.kept:
            state, output = cell.apply(state, row)
            outputs.append(output)
    return outputs, ends


def random_turns(rng: np.random.Generator, requests: list[Request], longest: int) -> list[Turn]:
    """Draws all kinds of turns: prompts, decode, verification, and kept rows alone."""
    turns = []
    for request in requests:
        accepted = int(rng.integers(request.drafts + 1))
        if request.settled == 0 or rng.random() < 0.2:
            turns.append(Turn(int(rng.integers(1, longest)), 0, accepted))
        elif rng.random() < 0.15:
            turns.append(Turn(0, 0, accepted))
        else:
            turns.append(Turn(int(rng.integers(1, 3)), int(rng.integers(0, 5)), accepted))
    return turns


def verification(traffic: Traffic, requests: list[Request], accepted: list[int]) -> Step:
    """Gives each request one certain row and three drafts."""
    return traffic.step(requests, [Turn(1, 3, number) for number in accepted])


def settled_requests() -> list[Request]:
    """Makes eight requests at different positions, each with three unverified drafts."""
    return [Request(10 + index, 900 + index, 3, 3 * index) for index in range(8)]
