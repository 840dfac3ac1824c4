# SPDX-License-Identifier: Apache-2.0
"""Recurrences of ragged steps against the formulas, token by token, in float64."""

import dataclasses

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from pairs import valuewise

from metal_kernels import kernel, recurrence
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.recurrence.layers import Layer, naive
from tests.metal_kernels.sequences_play import (
    Kind,
    Traffic,
    check_states,
    numbers,
    one_request,
    part_of,
    play,
)

SCHEDULES = ["forward", "reverse", "random:1"]
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


# Pools and layers: a case of each kind of decays by each rule, shares of rows that end early or are
# of single elements, heads that share keys or do not, one row a head.
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


def precision(*dtypes):
    """Returns the rounding error of numbers around 1."""
    return max({F32: 2e-5, F16: 4e-3, BF16: 3e-2}[dtype] for dtype in dtypes)


def check_kept(kept, inputs, wanted):
    for row, source in wanted.kept.items():
        for field in dataclasses.fields(RecurrenceInputs):
            found, given = getattr(kept, field.name), getattr(inputs, field.name)
            assert (found is None) == (given is None)
            assert found is None or mx.array_equal(found[row], given[source])


@valuewise(name=list(CASES), schedule=SCHEDULES)
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


def rows_of(rows, start, stop):
    """Slices the rows."""
    arrays = [getattr(rows, field.name) for field in dataclasses.fields(rows)]
    return RecurrenceInputs(*(None if array is None else array[start:stop] for array in arrays))


@pytest.mark.parametrize(
    "name",
    [
        name if name.startswith("delta") else pytest.param(name, marks=pytest.mark.more)
        for name in CASES
    ],
)
def test_a_row_gives_the_same_bits_as_whatever_it_is_computed(name):
    """Alone, in a prompt or as a draft; from a read state or from a kept row."""
    kind, layer = CASES[name]
    rng = np.random.default_rng(1)
    queries, inputs = layer.draw(rng, 9)
    log_rates = layer.draw_log_rates(rng) if layer.decays == "rates" else None

    def steps(*sizes):
        """Runs steps of (certain, drafts, accepted before); returns outputs and state."""
        pools, found, position, kept = kind.make(np.random.default_rng(2), 3), [], 0, None
        for certain, drafts, accepted in sizes:
            first, rows = position + accepted, certain + drafts
            step = one_request(rows, certain, accepted, position)
            y, kept, fence = recurrence.run(
                *(step.sequences(), queries[first : first + rows]),
                *(rows_of(inputs, first, first + rows), kept, pools, layer.part, layer.delta),
                *(log_rates, kind.split),
            )
            mx.eval(fence)
            found[first:] = list(y)
            position = first + certain
        state = kind.blocks(pools)[1, layer.start :]
        return mx.stack(found), state[: int(np.prod(layer.part.shape)) * layer.of_states.size]

    with kernel.using(metal_interpreter.metal_kernel):
        alone, state = steps(*[(1, 0, 0)] * 9)
        for other in (
            [(9, 0, 0)],
            [(4, 0, 0), (5, 0, 0)],
            [(2, 3, 0), (1, 3, 3), (0, 0, 3)],  # all drafts accepted, the last ones without a row
            [(3, 4, 0), (1, 3, 2), (2, 0, 1)],  # some rejected, and computed again
        ):
            y, state_of_other = steps(*other)
            assert mx.array_equal(y, alone)
            np.testing.assert_array_equal(state_of_other, state)


@pytest.mark.parametrize(
    "name", ["delta, keys", pytest.param("states, rates", marks=pytest.mark.more)]
)
def test_what_is_not_applied_is_not_looked_at(name):
    """NaN in rejected kept rows and in foreign blocks changes nothing."""
    kind, layer = CASES[name]
    rng = np.random.default_rng(3)
    queries, inputs = layer.draw(rng, 3)
    _, kept = layer.draw(rng, 8)
    log_rates = layer.draw_log_rates(rng) if layer.decays == "rates" else None
    found = []
    for fill in (0.0, float("nan")):
        unused = mx.arange(8) >= 2
        arrays = [getattr(kept, field.name) for field in dataclasses.fields(kept)]
        filled = RecurrenceInputs(
            *(
                None
                if array is None
                else mx.where(unused.reshape(-1, *[1] * (array.ndim - 1)), fill, array).astype(
                    array.dtype
                )
                for array in arrays
            )
        )
        pools = [mx.full(pool.shape, fill).astype(pool.dtype) for pool in kind.make(rng, 4)]
        with kernel.using(metal_interpreter.Checker("random:1").metal_kernel):
            step = one_request(3, 1)
            _, _, fence = recurrence.run(
                *(step.sequences(), queries, inputs, None, pools, layer.part, layer.delta),
                *(log_rates, kind.split),
            )
            step = one_request(3, 2, 2, 1, write=2, blocks=(3, 0, 0, 0, 0, 0, 0, 0))
            y, next_kept, fence = recurrence.run(
                *(step.sequences(), queries, inputs, filled, pools, layer.part, layer.delta),
                *(log_rates, kind.split, [fence]),
            )
            mx.eval(fence)
        found.append(
            (
                numbers(y),
                numbers(next_kept.keys[:2]),
                part_of(kind.blocks(pools)[1:], layer.part),
            )
        )
    for zeros, nans in zip(*found, strict=True):
        np.testing.assert_array_equal(np.array(zeros), np.array(nans))


def call(**changed):
    """Calls the op with three rows, except for the given changes."""
    layer = Layer((2, 8, 4, 4), True, "heads")
    queries, inputs = layer.draw(np.random.default_rng(0), 3)
    arguments = {
        "sequences": one_request(3, 1).sequences(),
        "queries": queries,
        "kept": None,
        "pools": [mx.zeros((2, 3, 4, 32)), mx.zeros((2, 3, 4, 32))],
        "part": layer.part,
        "delta": layer.delta,
    }
    fields = {name: changed.pop(name) for name in list(changed) if hasattr(inputs, name)}
    arguments["inputs"] = dataclasses.replace(inputs, **fields)
    return recurrence.run(**{**arguments, **changed})


KEPT = RecurrenceInputs(mx.zeros((8, 2, 8)), mx.zeros((8, 4, 4)), mx.zeros((8, 4)), None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queries": mx.zeros((2, 2, 8))}, r"queries: expected \[3, \*, \*\] float16 or"),
        ({"keys": mx.zeros((3, 2, 8), F16)}, r"inputs.keys: expected \[3, 2, 8\] float32"),
        ({"values": mx.zeros((3, 3, 4))}, "inputs.values: expected a multiple of 2 heads"),
        ({"rates": mx.zeros((3, 4), BF16)}, r"inputs.rates: expected \[3, 4\] float32"),
        ({"decays": mx.zeros((3, 4, 4))}, r"inputs.decays: expected \[3, 4, 8\] float32"),
        ({"decays": None}, "inputs.decays and log_rates: expected one of them"),
        ({"log_rates": mx.zeros((4, 8))}, "inputs.decays and log_rates: expected one of them"),
        ({"decays": None, "log_rates": mx.zeros((4, 4))}, r"log_rates: expected \[4, 8\] float32"),
        ({"kept": KEPT}, "kept.decays: expected if and only if inputs.decays is given"),
        ({"part": StatePart(8, (4, 4, 8), F32)}, "part: expected to begin at a multiple of 16"),
        ({"part": StatePart(1600, (4, 4, 8), F32)}, "part: .* found bytes 1600 to 2112"),
        ({"part": StatePart(0, (4, 8, 4), F32)}, r"part: expected \(4, 4, 8\) floats"),
        ({"split": 2}, r"pools: expected one or two \[Hkv, B \* 2, ...\]"),
        ({"pools": [mx.zeros((2, 3, 1, 65))]}, "pools: expected blocks of a multiple of 16 bytes"),
    ],
)
def test_refuses_what_does_not_fit(changed, message):
    with pytest.raises(ValueError, match=message):
        call(**changed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("table", mx.zeros((1, 8), mx.int32), r"sequences.table: expected \[\*, 9\] int32"),
        ("blocks", mx.zeros((2, 8), mx.int32), r"sequences.blocks: expected \[1, \*\] int32"),
        ("tiles", mx.zeros((1, 2)), r"sequences.tiles: expected \[\*, 2\] int32"),
        ("tiles", mx.zeros((0, 2), mx.int32), "found 1 requests and 0 tiles"),
    ],
)
def test_refuses_steps_that_do_not_fit(field, value, message):
    step = dataclasses.replace(one_request(3, 1).sequences(), **{field: value})
    with pytest.raises(ValueError, match=message):
        call(sequences=step)
