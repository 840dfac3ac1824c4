# SPDX-License-Identifier: Apache-2.0
"""One step of the token-by-token ops that detects each planted fault of their kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal_kernels import convolution, recurrence
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.recurrence.layers import Layer, naive
from tests.metal_kernels.sequences_play import (
    Apply,
    Kind,
    Step,
    check_states,
    convolved,
    numbers,
    part_of,
    play,
)

NUM_BLOCKS = 13


def _made_step() -> Step:
    """Makes a prompt with drafts in two tiles, drafts after kept rows, kept rows without a row.

    Blocks end in the prompt (most of them null), in kept rows, and where a state is written
    anyway, to the block that it was read from. Two requests are new: one has an ignored state in
    its block, one none. The last one's state is not written.
    """
    table = [
        [0, 73, 70, 0, 0, 0, 2, 2, 0],
        [73, 3, 1, 1, 2, 8, 3, 4, 3],
        [76, 0, 0, 5, 1, 9, 6, 6, 5],
        [76, 2, 2, 0, 0, 4, 7, 0, 5],
    ]
    blocks = np.zeros((4, 15), int)
    blocks[0, [0, 4, 13]] = 8, 9, 10
    blocks[1, 1], blocks[2, 1], blocks[3, 0] = 11, 6, 12
    return Step(np.array(table), blocks, 78, 6)


STEP = _made_step()


def _check(
    kind: Kind,
    pools: Sequence[mx.array],
    before: np.ndarray,
    part: StatePart,
    apply: Apply,
    found: tuple[mx.array, mx.array],
    cleared: Sequence[slice] = (),
) -> dict[int, int]:
    """Compares outputs, states and the fence; returns the step's expected kept rows."""
    states = part_of(before, part)
    wanted = play(STEP, lambda block: states[block] if block >= 0 else 0 * states[1], apply)
    out, fence = found
    mx.eval(fence)
    assert not np.array(fence).any()
    check_states(before, kind.blocks(list(pools)), part, wanted, cleared, atol=1e-5, rtol=1e-5)
    for row, output in enumerate(numbers(out)):
        np.testing.assert_allclose(output, wanted.outputs[row], atol=1e-5, rtol=1e-5)
    return wanted.kept


def _pools(kind: Kind) -> list[mx.array]:
    """Makes float32 pools with valid states everywhere."""
    rng = np.random.default_rng(0)
    shapes = [pool.shape for pool in kind.make(rng, NUM_BLOCKS)]
    return [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]


def convolve() -> None:
    """Convolves 13 channels with four taps; states begin in K and end in V."""
    kind, part = Kind((8, 8), 3, mx.float32, split=2), StatePart(128, (3, 13), mx.float32)
    rng, pools = np.random.default_rng(1), _pools(kind)
    inputs, kept, weight, bias = (
        mx.array(rng.normal(size=shape).astype(np.float32))
        for shape in ((78, 13), (6, 13), (13, 4), (13,))
    )
    before = kind.blocks(pools)
    out, next_kept, fence = convolution.run(
        *(STEP.sequences(), inputs, kept, weight, bias, pools, part, kind.split), state_bytes=340
    )
    apply, cleared = convolved(inputs, kept, weight, bias), (slice(284, 288), slice(340, 384))
    kept_rows = _check(kind, pools, before, part, apply, (out, fence), cleared)
    for row, source in kept_rows.items():
        np.testing.assert_array_equal(np.array(next_kept[row]), np.array(inputs[source]))


def recur(delta: bool, decays: str, key_size: int = 20) -> None:
    """Runs four heads of three values that share keys in pairs; states begin in K and end in V."""
    layer = Layer((2, key_size, 4, 3), delta, decays, start=64)
    kind = Kind((48 if key_size == 20 else 24, 40), 3, mx.float32)
    rng, pools, part = np.random.default_rng(1), _pools(kind), layer.part
    queries, inputs = layer.draw(rng, 78)
    _, kept = layer.draw(rng, 6)
    log_rates = layer.draw_log_rates(rng) if decays == "rates" else None
    before = kind.blocks(pools)
    found, next_kept, fence = recurrence.run(
        *(STEP.sequences(), queries, inputs, kept, pools, part, delta, log_rates)
    )
    apply = naive(layer, queries, inputs, kept, log_rates)
    rows = _check(kind, pools, before, part, apply, (found, fence))
    for field in dataclasses.fields(RecurrenceInputs):
        of_next, given = getattr(next_kept, field.name), getattr(inputs, field.name)
        for row, source in rows.items() if given is not None else ():
            np.testing.assert_array_equal(np.array(of_next[row]), np.array(given[source]))
