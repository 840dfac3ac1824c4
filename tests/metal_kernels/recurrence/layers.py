# SPDX-License-Identifier: Apache-2.0
"""Recurrences of random rows, and their float64 formulas, token by token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.sequences_play import Apply, numbers

F32 = mx.float32


@dataclass(frozen=True)
class Layer:
    """Shapes and dtypes of states and rows."""

    heads: tuple[int, int, int, int]  # HK, DK, HV, DV
    delta: bool
    decays: str  # "heads", "keys" or "rates"
    dtype: mx.Dtype = F32  # of queries and keys
    of_values: mx.Dtype = F32
    of_states: mx.Dtype = F32
    start: int = 0

    @property
    def part(self) -> StatePart:
        _, key_size, num_heads, value_size = self.heads
        return StatePart(self.start, (num_heads, value_size, key_size), self.of_states)

    def draw(self, rng, num_rows):
        """Draws queries and inputs; keys have length about 1, which keeps the delta rule stable."""
        num_keys, key_size, num_heads, value_size = self.heads
        decays = {"heads": (num_heads,), "keys": (num_heads, key_size), "rates": None}[self.decays]

        def normal(*shape, scale=1.0):
            return mx.array(rng.normal(0, scale, (num_rows, *shape)).astype(np.float32))

        def uniform(low, high, *shape):
            return mx.array(rng.uniform(low, high, (num_rows, *shape)).astype(np.float32))

        keys = normal(num_keys, key_size, scale=key_size**-0.5).astype(self.dtype)
        return normal(num_keys, key_size).astype(self.dtype), RecurrenceInputs(
            keys,
            normal(num_heads, value_size).astype(self.of_values),
            uniform(0.0, 1.0, num_heads),
            None if decays is None else uniform(0.5, 1.0, *decays),
        )

    def draw_log_rates(self, rng):
        shape = self.heads[2], self.heads[1]
        return mx.array(rng.uniform(-2, 0, shape).astype(np.float32))


def rounded(state, dtype):
    return state if dtype == F32 else numbers(mx.array(state.astype(np.float32)).astype(dtype))


def naive(
    layer: Layer,
    queries: mx.array,
    inputs: RecurrenceInputs,
    kept: RecurrenceInputs | None,
    log_rates: mx.array | None,
) -> Apply:
    """Returns the `apply` argument of `play`."""
    num_keys, _, num_heads, _ = layer.heads
    sources = {
        kind: {
            field.name: numbers(getattr(rows, field.name))
            for field in dataclasses.fields(rows)
            if getattr(rows, field.name) is not None
        }
        for kind, rows in (("inputs", inputs), ("kept", kept))
        if rows is not None
    }
    queries = numbers(queries)

    def of_heads(row):
        return np.repeat(row, num_heads // num_keys, axis=0)[:, None]  # [HV, 1, DK]

    def apply(state, kind, row):
        given = {name: array[row] for name, array in sources[kind].items()}
        key, rate = of_heads(given["keys"]), given["rates"][:, None]
        decay = given.get("decays")
        if decay is None:
            decay = np.exp(rate * numbers(log_rates))
        state = state * decay.reshape(num_heads, 1, -1)
        known = (state * key).sum(axis=2) if layer.delta else 0.0
        state = state + (rate * (given["values"] - known))[:, :, None] * key
        state = rounded(state, layer.of_states)
        output = None if kind == "kept" else (state * of_heads(queries[row])).sum(axis=2)
        return state, output

    return apply
