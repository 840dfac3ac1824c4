# SPDX-License-Identifier: Apache-2.0
"""Convolutions of ragged steps against a naive one, input by input, in float64."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import convolution, kernel
from metal_kernels.sequences import Sequences, StatePart
from tests.metal_kernels.sequences_play import Kind, Traffic, check_states, part_of, play

SCHEDULES = ["forward", "reverse", "random:1"]
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
CHANNELS = 40
# Pools, taps, dtypes of rows and of states, where these begin. A state is some 480 bytes.
CASES = {
    "states of K alone": (Kind((1024,), 1, F32), 4, F32, F32, 0),
    "on into V": (Kind((32, 64), 2, F32), 4, F32, F32, 32),
    "in three parts": (Kind((16, 48), 3, BF16, split=3), 4, BF16, BF16, 16),
    "codes": (Kind((96, 128), 3, mx.int8), 3, F16, F16, 48),
    "two taps, wider states": (Kind((64, 64), 2, F16, split=2), 2, BF16, F32, 160),
}


def numbers(array):
    return np.array(array.astype(F32), np.float64)


def draw(rng, shape, dtype):
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def tolerance(dtype):
    """Of a sum, whose terms are exact in float32 but for a few bits."""
    return {"atol": 1e-5, "rtol": {F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype]}


def naive(weight, bias, inputs, kept):
    """`apply` of `play`: arrays are float64."""

    def apply(state, kind, row):
        given = kept[row] if kind == "kept" else inputs[row]
        window = np.concatenate([state, given[None]])
        return window[1:], bias + (weight.T * window).sum(axis=0)

    return apply


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_steps_in_a_row(name, schedule):
    kind, taps, dtype, state_dtype, start = CASES[name]
    rng = np.random.default_rng([len(name), taps])
    traffic = Traffic(rng, 4)
    pools = kind.make(rng, traffic.num_blocks)
    part = StatePart(start, (taps - 1, CHANNELS), state_dtype)
    weight = draw(rng, (CHANNELS, taps, 1)[: 2 + taps % 2], dtype)
    bias = draw(rng, (CHANNELS,), dtype) if taps > 2 else None
    add = numbers(bias) if taps > 2 else 0.0
    kept = after = None
    with kernel.using(metal_interpreter.Checker(schedule).metal_kernel):
        for _ in range(5):
            step = traffic.step()
            inputs = draw(rng, (step.num_rows, CHANNELS), dtype)
            before = kind.blocks(pools)
            states = part_of(before, part)
            rows = numbers(inputs), None if kept is None else numbers(kept)
            of_weight = numbers(weight).reshape(CHANNELS, taps)
            wanted = play(
                step,
                lambda block, states=states: np.zeros(part.shape) if block < 0 else states[block],
                naive(of_weight, add, *rows),
            )
            out, kept, fence = convolution.run(
                step.sequences(), inputs, kept, weight, bias, pools, part, kind.split, after or ()
            )
            after = [fence]
            mx.eval(fence)
            check_states(before, kind.blocks(pools), part, wanted, rtol=0, atol=0)
            assert out.dtype == kept.dtype == dtype
            for row, found in enumerate(numbers(out)):
                np.testing.assert_allclose(found, wanted.outputs[row], **tolerance(dtype))
            for row, source in wanted.kept.items():
                assert mx.array_equal(kept[row], inputs[source])
