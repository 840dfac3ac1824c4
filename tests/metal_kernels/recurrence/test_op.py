# SPDX-License-Identifier: Apache-2.0
"""Recurrences of ragged steps against the formulas, token by token, in float64."""

import dataclasses
from dataclasses import dataclass

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel, recurrence
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.sequences_play import Kind, Traffic, check_states, part_of, play

SCHEDULES = ["forward", "reverse", "random:1"]
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


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
        """Queries and inputs of rows. Keys have length 1 or so, with which the delta rule is stable."""
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


# Pools and layers: a case of each kind of decays by each rule, shares of rows that end early or are of
# single elements, heads that share keys or do not, one row a head.
CASES = {
    "delta, heads": (Kind((2048, 1280), 1, F32), Layer((2, 32, 4, 6), True, "heads", start=160)),
    "delta, keys": (
        Kind((400, 304), 3, BF16, split=3),
        Layer((1, 20, 3, 5), True, "keys", F16, BF16, start=16),
    ),
    "delta, rates": (
        Kind((512, 256), 2, mx.int8),
        Layer((3, 6, 3, 4), True, "rates", BF16, F16, BF16),
    ),
    "states, heads": (
        Kind((1536, 1024), 2, F16),
        Layer((2, 128, 4, 3), False, "heads", F16, F16, F16, 1024),
    ),
    "states, keys": (Kind((1024,), 1, F32), Layer((2, 9, 2, 7), False, "keys", start=64)),
    "states, rates": (Kind((768,), 1, F32), Layer((1, 16, 40, 1), False, "rates", BF16, BF16)),
}


def numbers(array):
    return np.array(array.astype(F32), np.float64)


def rounded(state, dtype):
    return state if dtype == F32 else numbers(mx.array(state.astype(np.float32)).astype(dtype))


def naive(layer, queries, inputs, kept, log_rates):
    """`apply` of `play`."""
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


def precision(*dtypes):
    """What a number rounded to these may be away, of numbers around 1."""
    return max({F32: 2e-5, F16: 4e-3, BF16: 3e-2}[dtype] for dtype in dtypes)


def check_kept(kept, inputs, wanted):
    for row, source in wanted.kept.items():
        for field in dataclasses.fields(RecurrenceInputs):
            found, given = getattr(kept, field.name), getattr(inputs, field.name)
            assert (found is None) == (given is None)
            assert found is None or mx.array_equal(found[row], given[source])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_steps_in_a_row(name, schedule):
    kind, layer = CASES[name]
    rng = np.random.default_rng(len(name))
    traffic, part = Traffic(rng, 3), layer.part
    pools = kind.make(rng, traffic.num_blocks)
    log_rates = layer.draw_log_rates(rng) if layer.decays == "rates" else None
    kept, after = None, ()
    with kernel.using(metal_interpreter.Checker(schedule).metal_kernel):
        for _ in range(4):
            step = traffic.step(longest=12)
            queries, inputs = layer.draw(rng, step.num_rows)
            before = kind.blocks(pools)
            states = part_of(before, part)
            wanted = play(
                step,
                lambda block, states=states: np.zeros(part.shape) if block < 0 else states[block],
                naive(layer, queries, inputs, kept, log_rates),
            )
            found, kept, fence = recurrence.run(
                *(step.sequences(), queries, inputs, kept, pools, part, layer.delta),
                *(log_rates, kind.split, after),
            )
            after = [fence]
            mx.eval(fence)
            near = precision(layer.of_states)
            check_states(before, kind.blocks(pools), part, wanted, atol=near, rtol=near)
            near = precision(layer.of_states, layer.of_values)
            assert found.dtype == layer.of_values
            for row, output in enumerate(numbers(found)):
                np.testing.assert_allclose(
                    output, wanted.outputs[row], atol=near * layer.heads[1] ** 0.5, rtol=near
                )
            check_kept(kept, inputs, wanted)
