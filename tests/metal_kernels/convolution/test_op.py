# SPDX-License-Identifier: Apache-2.0
"""Convolutions of ragged steps, against a naive one in float64."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from pairs import valuewise

from metal_kernels import convolution, kernel
from metal_kernels.sequences import StatePart
from tests.metal_kernels.sequences_play import (
    Kind,
    Traffic,
    check_states,
    convolved,
    numbers,
    one_request,
    part_of,
    play,
)

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


def draw(rng, shape, dtype):
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def tolerance(dtype):
    """Tolerance of a sum whose terms are nearly exact in float32."""
    return {"atol": 1e-5, "rtol": {F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype]}


@valuewise(name=list(CASES), schedule=SCHEDULES)
def test_steps_in_a_row(name, schedule):
    kind, taps, dtype, state_dtype, start = CASES[name]
    rng = np.random.default_rng([len(name), taps])
    traffic = Traffic(rng, 4)
    pools = kind.make(rng, traffic.num_blocks)
    part = StatePart(start, (taps - 1, CHANNELS), state_dtype)
    weight = draw(rng, (CHANNELS, taps, 1)[: 2 + taps % 2], dtype)
    bias = draw(rng, (CHANNELS,), dtype) if taps > 2 else None
    kept = after = None
    with kernel.using(metal_interpreter.Checker(schedule).metal_kernel):
        for _ in range(5):
            step = traffic.step()
            inputs = draw(rng, (step.num_rows, CHANNELS), dtype)
            before = kind.blocks(pools)
            states = part_of(before, part)
            wanted = play(
                step,
                lambda block, states=states: np.zeros(part.shape) if block < 0 else states[block],
                convolved(inputs, kept, weight, bias),
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


#: Pools and layers of CASES, channels, bytes of a state, and those of its block that are cleared.
STATES = [
    ("on into V", 41, 532, 768),  # 256 in K, 512 in V
    ("in three parts", 41, 270, 288),
    ("on into V", 8, 250, 256),  # the whole of K
    ("states of K alone", 41, 500, 4096),  # of 4096 in K
    ("codes", 41, 287, 288),
    ("in three parts", 41, 290, 1152),
    ("on into V", 8, 256, 256),
]


@valuewise(state=STATES, schedule=SCHEDULES)
def test_nothing_of_its_last_owner_stays_in_a_block(state, schedule):
    """Blocks hold random bits; only states that stay in their blocks are written."""
    name, channels, state_bytes, used = state
    kind, taps, dtype, state_dtype, start = CASES[name]
    rng = np.random.default_rng(channels)
    traffic = Traffic(rng, 3)
    pools = kind.make(rng, traffic.num_blocks)
    part = StatePart(start, (taps - 1, channels), state_dtype)
    weight, kept, after = draw(rng, (channels, taps), dtype), None, ()
    end = start + int(np.prod(part.shape)) * state_dtype.size
    cleared = slice(end, -(-end // 16) * 16), slice(state_bytes, used)
    num_fresh = 0
    with kernel.using(metal_interpreter.Checker(schedule).metal_kernel):
        for _ in range(4):
            step = traffic.step(longest=12)
            inputs = draw(rng, (step.num_rows, channels), dtype)
            before = kind.blocks(pools)
            states = part_of(before, part)
            wanted = play(
                step,
                lambda block, states=states: np.zeros(part.shape) if block < 0 else states[block],
                convolved(inputs, kept, weight, None),
            )
            _, kept, fence = convolution.run(
                *(step.sequences(), inputs, kept, weight, None, pools, part, kind.split, after),
                state_bytes=state_bytes,
            )
            after = [fence]
            mx.eval(fence)
            check_states(before, kind.blocks(pools), part, wanted, cleared, rtol=0, atol=0)
            num_fresh += len(wanted.fresh)
    assert num_fresh


def run_alone(kind, layer, rng, sizes, inputs, weight, bias):
    """Steps of one request, each of (certain, drafts, accepted of the step before).

    Returns:
        The last outputs of each row, and the state at the end.
    """
    _, taps, _, state_dtype, start = layer
    part = StatePart(start, (taps - 1, CHANNELS), state_dtype)
    pools, found, position, kept = kind.make(rng, 3), [], 0, None
    for certain, drafts, accepted in sizes:
        first, rows = position + accepted, certain + drafts
        step = one_request(rows, certain, accepted, position)
        out, kept, fence = convolution.run(
            *(step.sequences(), inputs[first : first + rows], kept, weight, bias, pools, part),
            kind.split,
        )
        mx.eval(fence)
        found[first:] = list(out)
        position = first + certain
    return mx.stack(found), part_of(kind.blocks(pools), part)[1]


@pytest.mark.parametrize("name", [pytest.param("on into V", marks=pytest.mark.more), "codes"])
def test_a_row_gives_the_same_bits_as_whatever_it_is_computed(name):
    """Alone, in a prompt or as a draft; from a read state or from kept rows."""
    kind, taps, dtype, *_ = CASES[name]
    rng = np.random.default_rng(1)
    given = (
        draw(rng, (9, CHANNELS), dtype),
        draw(rng, (CHANNELS, taps), dtype),
        draw(rng, (CHANNELS,), dtype),
    )
    with kernel.using(metal_interpreter.metal_kernel):
        alone, state = run_alone(kind, CASES[name], rng, [(1, 0, 0)] * 9, *given)
        for sizes in (
            [(9, 0, 0)],
            [(2, 3, 0), (1, 3, 3), (0, 0, 3)],  # all drafts accepted, the last ones without a row
            [(3, 4, 0), (1, 3, 2), (2, 0, 1)],  # some rejected, and computed again
        ):
            out, state_of_these = run_alone(kind, CASES[name], rng, sizes, *given)
            assert mx.array_equal(out, alone)
            np.testing.assert_array_equal(state_of_these, state)


def test_what_is_not_applied_is_not_looked_at():
    """NaN in rejected kept rows and in foreign blocks changes nothing."""
    kind, taps, dtype, _, start = CASES["on into V"]
    rng = np.random.default_rng(3)
    part = StatePart(start, (taps - 1, CHANNELS), F32)
    inputs, kept, weight = (draw(rng, (n, CHANNELS), dtype) for n in (3, 8, taps))
    found = []
    for fill in (0.0, float("nan")):
        pools = [mx.full(pool.shape, fill) for pool in kind.make(rng, 4)]
        filled = mx.where((mx.arange(8) >= 2)[:, None], fill, kept)
        with kernel.using(metal_interpreter.Checker("random:1").metal_kernel):
            for step, before in (
                (one_request(3, 1), None),
                (one_request(3, 2, 2, 1, write=2, blocks=(3, 0, 0, 0, 0, 0, 0, 0)), filled),
            ):
                out, next_kept, fence = convolution.run(
                    *(step.sequences(), inputs, before, weight.T, None, pools, part)
                )
                mx.eval(fence)
        states = part_of(kind.blocks(pools), part)[1:]
        found.append((numbers(out), numbers(next_kept[:1]), states))
    for zeros, nans in zip(*found, strict=True):
        np.testing.assert_array_equal(zeros, nans)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs": mx.zeros((2, 8))}, r"inputs: expected \[3, \*\] float16 or"),
        ({"inputs": mx.zeros((3, 8), mx.int32)}, r"inputs: .* found \(3, 8\) .*int32"),
        ({"weight": mx.zeros((7, 4))}, r"weight: expected \[8, \*\]"),
        ({"weight": mx.zeros((8, 4, 2))}, r"weight: expected \[8, \*, 1\]"),
        ({"weight": mx.zeros((8, 1))}, "weight: expected 8 channels or more and 2 to 65 taps"),
        ({"kept": mx.zeros((2, 8), F16)}, r"kept: expected \[\*, 8\] float32"),
        ({"bias": mx.zeros((7,))}, r"bias: expected \[8\] float"),
        ({"part": StatePart(16, (4, 8), F32)}, r"part: expected \(3, 8\) floats"),
    ],
)
def test_refuses_what_does_not_fit(changed, message):
    arguments = {
        "sequences": one_request(3, 1).sequences(),
        "inputs": mx.zeros((3, 8)),
        "kept": None,
        "weight": mx.zeros((8, 4)),
        "bias": None,
        "pools": [mx.zeros((1, 4, 2, 64))],
        "part": StatePart(16, (3, 8), F32),
    }
    with pytest.raises(ValueError, match=message):
        convolution.run(**{**arguments, **changed})
