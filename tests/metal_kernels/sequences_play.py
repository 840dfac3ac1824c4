# SPDX-License-Identifier: Apache-2.0
"""Random ragged steps over one pool, and the expected results of token-by-token ops.

`Traffic` makes steps of continuing requests: prompts, decode, partially accepted drafts, empty
rows, and new requests that replace ended ones. `play` runs a step naively, request by request and
token by token, with a function of one state and one token. `Pool` holds states as bytes in numpy,
and knows which of them a step may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.sequences import COLUMNS, TILE_ROWS, Sequences, StatePart

BLOCK_SIZE = 5
OF_REQUEST = 4  # blocks per request; block 0 is unused
#: Maps a state, "kept" or "inputs", and a row index to the next state and the output.
Apply = Callable[[np.ndarray, str, int], tuple[np.ndarray, np.ndarray | None]]
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True)
class Step:
    """Like `Sequences`, in numpy."""

    table: np.ndarray  # [N, COLUMNS]
    blocks: np.ndarray  # [N, W]
    num_rows: int
    num_kept: int

    def sequences(self) -> Sequences:
        tiles = [
            (request, first)
            for request, columns in enumerate(self.table)
            for first in range(0, max(columns[1], 1), TILE_ROWS)
        ]
        tiles.append((0, 1 << 20))  # padding
        return Sequences(
            mx.array(self.table.astype(np.int32)),
            mx.array(self.blocks.astype(np.int32)),
            mx.array(np.array(tiles, np.int32)),
            BLOCK_SIZE,
            self.num_rows,
            self.num_kept,
        )


def one_request(rows, certain, num_kept=0, position=0, read=1, write=1, blocks=(0,) * 8, keep=8):
    """Makes a step of a single request whose kept rows come first."""
    columns = [0, rows, certain, 0, num_kept, position, read, write, 0]
    return Step(np.array([columns]), np.array([blocks]), rows, keep)


class Traffic:
    """Makes steps of `num_requests` concurrent requests."""

    def __init__(self, rng: np.random.Generator, num_requests: int) -> None:
        self._rng, self.num_blocks = rng, 1 + OF_REQUEST * num_requests
        self._requests: list[dict[str, int] | None] = [None] * num_requests

    def step(self, longest: int = 80) -> Step:
        """Returns the next step: up to `longest` rows and 5 drafts per request, some accepted."""
        rng, table, blocks, row, kept = self._rng, [], [], 0, 0
        for place, old in enumerate(self._requests):
            own = 1 + place * OF_REQUEST + np.arange(OF_REQUEST)
            before = old or {"position": 0, "state": self.num_blocks - 1, "kept_at": 0, "drafts": 0}
            accepted = int(rng.integers(0, before["drafts"] + 1))
            certain = int(rng.choice([1, 1, int(rng.integers(1, longest + 1))]))
            drafts = int(rng.integers(0, 6))
            if old is not None and rng.random() < 0.2:
                certain = drafts = 0
            ends = rng.random() < 0.15
            write = 0 if ends else int(rng.choice(own))
            column = [row, certain + drafts, certain, before["kept_at"], accepted]
            table.append([*column, before["position"], before["state"], write, kept])
            blocks.append(rng.choice([0, 0, *own, write], 120))
            after = before["position"] + accepted + certain
            next_of = {"position": after, "state": write, "kept_at": kept, "drafts": drafts}
            ends = ends or after + longest > 100 * BLOCK_SIZE
            self._requests[place] = None if ends else next_of
            row, kept = row + certain + drafts, kept + drafts
        table.append([0] * COLUMNS)  # padding
        blocks.append(blocks[0])
        return Step(np.array(table), np.array(blocks), row, kept + 2)


@dataclass(frozen=True)
class Played:
    """Expected results of a step."""

    outputs: dict[int, np.ndarray]  # by row
    kept: dict[int, int]  # rows of the step, by kept row
    states: dict[int, np.ndarray]  # by block
    fresh: set[int]  # among these, blocks other than the one the state was read from


def play(
    step: Step,
    read: Callable[[int], np.ndarray],
    apply: Apply,
) -> Played:
    """Plays a step.

    Args:
        read: returns a block's state before the step; for block -1, the initial state.
        apply: processes a token.
    """
    played = Played({}, {}, {}, set())
    for request, columns in enumerate(step.table.tolist()):
        first, rows, certain, first_kept, num_kept, position, block, write, keep_at = columns
        state, before = read(block if position else -1), set(played.states)
        tokens = [("kept", first_kept + i) for i in range(num_kept)]
        tokens += [("inputs", first + i) for i in range(rows)]
        for count, (kind, row) in enumerate(tokens, 1):
            state, output = apply(state, kind, row)
            if kind == "inputs":
                played.outputs[row] = output
            if count > num_kept + certain:
                played.kept[keep_at + count - num_kept - certain - 1] = row
                continue
            where, lag = divmod(position + count, BLOCK_SIZE)
            if lag == 0 and step.blocks[request, where - 1]:
                played.states[step.blocks[request, where - 1]] = state
            if count == num_kept + certain and write:
                played.states[write] = state
        if num_kept + certain == 0 and write:
            played.states[write] = state
        played.fresh.update(set(played.states) - before - ({block} if position else set()))
    return played


def numbers(array: mx.array) -> np.ndarray:
    """Converts an array to float64."""
    return np.array(array.astype(mx.float32), np.float64)


def convolved(
    inputs: mx.array, kept: mx.array | None, weight: mx.array, bias: mx.array | None
) -> Apply:
    """Returns `apply` for convolutions, from the op's arrays."""
    rows = {"inputs": numbers(inputs), "kept": None if kept is None else numbers(kept)}
    factors = numbers(weight).reshape(weight.shape[:2]).T
    offset = 0.0 if bias is None else numbers(bias)

    def apply(state: np.ndarray, kind: str, row: int) -> tuple[np.ndarray, np.ndarray]:
        window = np.concatenate([state, rows[kind][row][None]])
        return window[1:], offset + (factors * window).sum(axis=0)

    return apply


@dataclass(frozen=True)
class Kind:
    """Pool shape: elements per block and head of each part; heads; dtype; parts of a block."""

    sizes: tuple[int, ...]
    heads: int
    dtype: mx.Dtype
    split: int = 1

    def make(self, rng: np.random.Generator, num_blocks: int) -> list[mx.array]:
        """Makes pools of random bits."""
        return [
            mx.array(
                rng.integers(
                    0,
                    256,
                    (self.heads, num_blocks * self.split, 2, size // 2 * self.dtype.size),
                    np.uint8,
                )
            ).view(self.dtype)
            for size in self.sizes
        ]

    def blocks(self, pools: list[mx.array]) -> np.ndarray:
        """Returns [B, bytes of a block], K before V, head by head, as a copy."""
        found = [np.array(pool.view(_UNSIGNED[pool.dtype.size])).view(np.uint8) for pool in pools]
        shape = (self.heads, found[0].shape[1] // self.split, -1)
        of_pools = [array.reshape(shape).swapaxes(0, 1) for array in found]
        return np.concatenate([array.reshape(shape[1], -1) for array in of_pools], axis=1)


def part_of(blocks: np.ndarray, part: StatePart) -> np.ndarray:
    """Returns [B, ...] float64, the part of each block's state."""
    size = int(np.prod(part.shape)) * part.dtype.size
    taken = mx.array(np.ascontiguousarray(blocks[:, part.start : part.start + size]))
    with np.errstate(invalid="ignore"):  # unused bits may be NaN
        numbers = np.array(taken.view(part.dtype).astype(mx.float32), np.float64)
    return numbers.reshape(-1, *part.shape)


def check_states(
    before: np.ndarray,
    after: np.ndarray,
    part: StatePart,
    played: Played,
    cleared: Sequence[slice] = (),
    **tolerance: Any,
) -> None:
    """Checks that a step wrote the right states, and changed no other byte of any block.

    Exception: bytes cleared in blocks other than the one the state was read from.
    """
    end = part.start + int(np.prod(part.shape)) * part.dtype.size
    expected = before.copy()
    for span in cleared:
        expected[list(played.fresh), span] = 0
    of_states = list(played.states), slice(part.start, end)
    expected[of_states] = after[of_states]
    np.testing.assert_array_equal(after, expected)
    states = part_of(after, part)
    for block, state in played.states.items():
        np.testing.assert_allclose(states[block], state, **tolerance)
