# SPDX-License-Identifier: Apache-2.0
"""Runs steps of recurrent layers, and compares them with the formulas, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import prod

import mlx.core as mx
import numpy as np

from metal_kernels import convolution, recurrence
from metal_kernels.kv_states import reference as states_reference
from metal_kernels.selfcheck.case import Case, StateKind
from metal_kernels.selfcheck.findings import Finding, compare, floats
from metal_kernels.sequences import TILE_ROWS, RecurrenceInputs, Sequences, StatePart
from metal_kernels.token_ops import UNIT_BYTES

_REQUESTS = 3
_OF_REQUEST = 4  # blocks: two alternating for its state, two alternating for full blocks
_MOST_DRAFTS = 3
_LONGEST = {"convolution": TILE_ROWS + 6, "recurrence": 9}  # rows of a prompt's chunk
_FLOAT_EPS = 2.0**-23

#: Maps a state, a step's index and a row of that step to the next state and the output.
_Apply = Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Step:
    table_np: np.ndarray  # [N, COLUMNS]
    blocks_np: np.ndarray  # [N, W]
    num_rows: int

    def sequences(self, block_size: int) -> Sequences:
        tiles = [
            (request, first)
            for request, columns in enumerate(self.table_np)
            for first in range(0, max(columns[1], 1), TILE_ROWS)
        ]
        return Sequences(
            mx.array(self.table_np),
            mx.array(self.blocks_np),
            mx.array(np.array(tiles, np.int32)),
            block_size,
            self.num_rows,
            _REQUESTS * _MOST_DRAFTS,
        )


def findings(case: Case, kernel: str, num_steps: int) -> Iterator[Finding]:
    """Runs `num_steps` steps; yields findings of each step's outputs and of the final states."""
    kind = case.states
    assert kind is not None  # checks() selects these kernels only for cases with states
    steps = _steps(np.random.default_rng(0), case.block_size, num_steps, _LONGEST[kernel])
    layer = (_Convolution if kernel == "convolution" else _Recurrence)(case, kind, steps)
    pools, split = make_pools(case, layer.part)
    kept: object = None
    results: list[mx.array] = []
    after: list[mx.array] = []
    for index, step in enumerate(steps):
        out, kept, fence = layer.run(
            index, step.sequences(case.block_size), kept, pools, split, after
        )
        results.append(out)
        after = [fence]
    mx.eval(results, after)  # nothing waited before, so dispatches could overlap
    states: dict[int, np.ndarray] = {}
    wanted = _replay(steps, np.zeros(layer.part.shape), states, layer.apply, case.block_size)
    axes: tuple[str, ...] = ("row", "channel")
    if kernel == "recurrence":
        axes = ("row", "head", "element")
    for index, (found, expected) in enumerate(zip(results, wanted, strict=True)):
        if not expected.size:
            continue
        allowed = np.abs(expected) * mx.finfo(case.dtype).eps + _tolerance(layer.part, expected)
        yield compare(f"step {index}: output", axes, floats(found), expected, allowed)
    blocks = sorted(states)
    expected = np.stack([states[block] for block in blocks])
    with mx.stream(mx.cpu):
        state = _read(pools, blocks, layer.part, split)
    allowed = np.broadcast_to(_tolerance(layer.part, expected), expected.shape)
    of_state = ("input", "channel") if kernel == "convolution" else ("head", "row", "element")
    yield compare("states at the end", ("block", *of_state), state, expected, allowed)


def _tolerance(part: StatePart, expected: np.ndarray) -> float:
    """Returns the tolerance: float32 rounding of sums over a row, and of a state to its dtype."""
    eps = 0.0 if part.dtype == mx.float32 or len(part.shape) == 2 else mx.finfo(part.dtype).eps
    largest = float(np.abs(expected).max(initial=0.0))
    return largest * (16 * eps + _FLOAT_EPS * (64 + 4 * part.shape[-1] ** 0.5))


def _steps(rng: np.random.Generator, block_size: int, count: int, longest: int) -> list[_Step]:
    """Creates steps of new requests: prompt chunks, decodes, drafts, and kept rows alone."""
    width = count * (longest + _MOST_DRAFTS) // block_size + 2
    position, read, drafts = np.zeros((3, _REQUESTS), int)
    found = []
    for index in range(count):
        table, row = [], 0
        for request in range(_REQUESTS):
            own = 1 + request * _OF_REQUEST
            accepted = int(rng.integers(0, drafts[request] + 1))
            certain = longest - request if (index + request) % 5 == 0 else 1
            verified = int((index + request) % (_MOST_DRAFTS + 1))
            if index % 7 == 6:
                certain = verified = 0
            at, write = request * _MOST_DRAFTS, own + index % 2
            rows = (row, certain + verified, certain, at, accepted)
            table.append((*rows, position[request], read[request], write, at))
            row += certain + verified
            position[request] += accepted + certain
            read[request], drafts[request] = write, verified
        full = 3 + _OF_REQUEST * np.arange(_REQUESTS)[:, None] + np.arange(width) % 2
        found.append(_Step(np.array(table, np.int32), full.astype(np.int32), row))
    return found


def _replay(
    steps: list[_Step],
    zeros: np.ndarray,
    states: dict[int, np.ndarray],
    apply: _Apply,
    block_size: int,
) -> Iterator[np.ndarray]:
    """Computes steps token by token; yields their [T, ...] outputs; fills `states` by block."""
    drafts: list[list[tuple[int, int]]] = [[]] * _REQUESTS  # by step and row
    for index, step in enumerate(steps):
        outputs = []
        for request, columns in enumerate(step.table_np.tolist()):
            first, count, certain, _, accepted, position, read, write, _ = columns
            state = states[read] if position else zeros
            rows = [(index, row) for row in range(first, first + count)]
            for number, token in enumerate([*drafts[request][:accepted], *rows]):
                state, output = apply(state, *token)
                if number >= accepted:
                    outputs.append(output)
                if number < accepted + certain:
                    block, offset = divmod(position + number + 1, block_size)
                    if offset == 0:
                        states[int(step.blocks_np[request, block - 1])] = state
                    states[write] = state
            if accepted + certain == 0:
                states[write] = state
            drafts[request] = rows[certain:]
        yield np.stack(outputs) if outputs else np.zeros(0)


class _Convolution:
    def __init__(self, case: Case, kind: StateKind, steps: list[_Step]) -> None:
        rng = np.random.default_rng(1)
        self.part = parts_of(case)[0]
        self._inputs = [_normal(rng, (s.num_rows, kind.channels), case.dtype) for s in steps]
        self._weight = _normal(rng, (kind.channels, kind.taps), case.dtype)
        self._rows_np = [floats(array) for array in self._inputs]
        self._weight_np = floats(self._weight).T

    def run(
        self,
        index: int,
        step: Sequences,
        kept: object,
        pools: list[mx.array],
        split: int,
        after: list[mx.array],
    ) -> tuple[mx.array, object, mx.array]:
        rows = (self._inputs[index], kept, self._weight, None)
        return convolution.run(step, *rows, pools, self.part, split, after)  # type: ignore[arg-type]

    def apply(self, state: np.ndarray, index: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        window = np.concatenate([state, self._rows_np[index][row][None]])
        return window[1:], (self._weight_np * window).sum(axis=0)


class _Recurrence:
    """A recurrence of random rows with keys of length about 1."""

    def __init__(self, case: Case, kind: StateKind, steps: list[_Step]) -> None:
        assert kind.heads is not None
        rng = np.random.default_rng(1)
        self._kind, self.part = kind, parts_of(case)[1]
        self._group = kind.heads[2] // kind.heads[0]
        self._rows = [recurrence_rows(rng, case, kind, step.num_rows) for step in steps]
        self._rows_np = [
            {"queries": floats(queries)}
            | {
                field.name: floats(array)
                for field in fields(inputs)
                if (array := getattr(inputs, field.name)) is not None
            }
            for queries, inputs in self._rows
        ]
        shape = kind.heads[2], kind.heads[1]
        rates = mx.array(rng.uniform(-2, 0, shape).astype(np.float32))
        self._log_rates = rates if kind.decays == "rates" else None
        self._log_rates_np = floats(rates)

    def run(
        self,
        index: int,
        step: Sequences,
        kept: object,
        pools: list[mx.array],
        split: int,
        after: list[mx.array],
    ) -> tuple[mx.array, object, mx.array]:
        rows = (*self._rows[index], kept)
        rule = (self._kind.delta, self._log_rates, split, after)
        return recurrence.run(step, *rows, pools, self.part, *rule)  # type: ignore[arg-type]

    def apply(self, state: np.ndarray, index: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        given = {name: array[row] for name, array in self._rows_np[index].items()}
        query, key = (
            np.repeat(given[name], self._group, axis=0)[:, None]  # [HV, 1, DK]
            for name in ("queries", "keys")
        )
        rate = given["rates"][:, None]
        decay = given.get("decays", np.exp(rate * self._log_rates_np))
        state = state * decay.reshape(len(decay), 1, -1)
        known = (state * key).sum(axis=2) if self._kind.delta else 0.0
        state = state + (rate * (given["values"] - known))[:, :, None] * key
        if self.part.dtype != mx.float32:
            state = floats(mx.array(state).astype(self.part.dtype))
        return state, (state * query).sum(axis=2)


def recurrence_rows(
    rng: np.random.Generator, case: Case, kind: StateKind, num_rows: int
) -> tuple[mx.array, RecurrenceInputs]:
    """Returns queries and inputs of random rows."""
    assert kind.heads is not None
    num_keys, key_size, num_heads, value_size = kind.heads
    queries, keys = (
        _normal(rng, (num_rows, num_keys, key_size), case.dtype, key_size**-0.5) for _ in range(2)
    )
    rates = mx.array(rng.uniform(0, 1, (num_rows, num_heads)).astype(np.float32))
    decays = {"heads": (), "keys": (key_size,)}.get(kind.decays)
    return queries, RecurrenceInputs(
        keys,
        _normal(rng, (num_rows, num_heads, value_size), case.dtype),
        rates,
        None
        if decays is None
        else mx.array(rng.uniform(0.5, 1, (num_rows, num_heads, *decays)).astype(np.float32)),
    )


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0
) -> mx.array:
    return mx.array(rng.normal(0, scale, shape).astype(np.float32)).astype(dtype)


def parts_of(case: Case) -> tuple[StatePart, StatePart]:
    """Returns the convolution's part of a state and the recurrence's after it."""
    kind = case.states
    assert kind is not None
    first = StatePart(0, (kind.taps - 1, kind.channels), case.dtype)
    end = prod(first.shape) * case.dtype.size
    heads = kind.heads or (0, 0, 0, 0)
    start = -(-end // UNIT_BYTES) * UNIT_BYTES
    return first, StatePart(start, (heads[2], heads[3], heads[1]), kind.dtype)


def make_pools(case: Case, part: StatePart, fill: int = 255) -> tuple[list[mx.array], int]:
    """Creates pools like the case's layers', and returns the number of their blocks per state.

    Each byte is `fill`: 255 makes floats NaN.
    """
    shape = case.shape
    sizes = [shape.head_size] if shape.latent else [shape.head_size, shape.value_size]
    block = sum(shape.num_kv_heads * case.block_size * size for size in sizes)
    end = part.start + prod(part.shape) * part.dtype.size
    split = -(-end // (block * case.cache_dtype.size))
    count = (1 + _REQUESTS * _OF_REQUEST) * split
    heads = (shape.num_kv_heads, count, case.block_size)
    pools = [
        mx.full((*heads, size * case.cache_dtype.size), fill, mx.uint8).view(case.cache_dtype)
        for size in sizes
    ]
    mx.eval(pools)
    return pools, split


def _read(pools: list[mx.array], blocks: list[int], part: StatePart, split: int) -> np.ndarray:
    """Returns [n, ...] of the part of states in these blocks."""
    size = prod(part.shape) * part.dtype.size
    width = -(-(part.start + size) // pools[0].dtype.size)
    bits = states_reference.read(pools, mx.array(blocks, mx.int32), width, split)
    taken = mx.contiguous(bits.view(mx.uint8)[:, part.start : part.start + size])
    return floats(taken.view(part.dtype)).reshape(len(blocks), *part.shape)
