# SPDX-License-Identifier: Apache-2.0
"""A step reads and writes a state once, and once more per filled block."""

import math

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import convolution, kernel, recurrence
from metal_kernels.sequences import StatePart
from tests.metal_kernels.recurrence.layers import Layer
from tests.metal_kernels.sequences_play import BLOCK_SIZE, Step

CHANNELS = 96
CONVOLUTION = StatePart(0, (3, CHANNELS), mx.float32)
LAYER = Layer((2, 128, 4, 8), True, "heads", start=3 * CHANNELS * 4)
STATE = CONVOLUTION.shape[0] * CHANNELS + math.prod(LAYER.part.shape)
POOL = (1, 12, 1, STATE + 64)
KEPT = 4 * 8  # rows


def step_of(position: int, drafts: int, accepted: int, full: tuple[int, ...] = ()) -> Step:
    """Makes a step of two requests that decode and verify; `full`: the first one's full blocks."""
    table = [
        [r * (drafts + 1), drafts + 1, 1, 8 * r, accepted, position, r + 1, r + 1, 8 * r]
        for r in range(2)
    ]
    blocks = np.zeros((2, 8), int)
    blocks[0, : len(full)] = full
    return Step(np.array(table), blocks, 2 * (drafts + 1), KEPT)


def measure(step: Step, clears: bool = False) -> dict[str, metal_interpreter.Traffic]:
    """Returns each kernel's pool traffic; `clears`: include clearing a new block."""
    rng, checker = np.random.default_rng(0), metal_interpreter.Checker()
    queries, inputs = LAYER.draw(rng, step.num_rows)
    _, kept = LAYER.draw(rng, KEPT)
    pools, rows = [mx.zeros(POOL)], mx.zeros((step.num_rows, CHANNELS))
    with kernel.using(checker.metal_kernel):
        _, _, fence = convolution.run(
            *(step.sequences(), rows, mx.zeros((KEPT, CHANNELS)), mx.zeros((CHANNELS, 4)), None),
            *(pools, CONVOLUTION),
            state_bytes=4 * STATE if clears else None,
        )
        recurrence.run(
            *(step.sequences(), queries, inputs, kept, pools, LAYER.part, LAYER.delta),
            after=[fence],
        )
    return {dispatch.kernel: dispatch.buffers["key_pool"] for dispatch in checker.dispatches}


def moved(traffic: metal_interpreter.Traffic, part: StatePart) -> tuple[float, float]:
    """Returns the number of states read and written for two requests."""
    size = math.prod(part.shape) * 4
    return traffic.read_bytes / size, traffic.written_bytes / size


PARTS = {"convolution": CONVOLUTION, "recurrence": LAYER.part}


@pytest.mark.parametrize(
    "drafts", [0, 3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5, 6, 7))]
)
def test_a_state_moves_once_whatever_the_drafts(drafts):
    accepted = min(drafts, 2)
    step = step_of(2 * BLOCK_SIZE, drafts, accepted)
    for name, traffic in measure(step, clears=True).items():
        assert moved(traffic, PARTS[name]) == (2, 2)


@pytest.mark.parametrize(
    ("position", "accepted", "full", "writes"),
    [
        (BLOCK_SIZE - 1, 4, (0, 0), 0),  # ends with a kept row, and is nobody's
        (BLOCK_SIZE - 1, 4, (5, 6), 1),
        (BLOCK_SIZE - 3, 2, (5, 6), 1),  # ends with the certain row
        (BLOCK_SIZE - 3, 2, (1, 6), 0),  # the block that the state is written to anyway
        (BLOCK_SIZE - 1, 6, (5, 6), 2),
        (BLOCK_SIZE - 2, 0, (5, 6), 0),  # ends with a draft
    ],
)
def test_a_full_block_costs_a_write(position, accepted, full, writes):
    for name, traffic in measure(step_of(position, 7, accepted, full)).items():
        assert moved(traffic, PARTS[name]) == (2, 2 + writes)


def test_neighboring_lanes_move_neighboring_bytes():
    for name, traffic in measure(step_of(BLOCK_SIZE, 1, 1)).items():
        lines = 2 * math.prod(PARTS[name].shape) * 4 / 128
        assert lines <= traffic.lines_read <= 1.1 * lines
        assert lines <= traffic.lines_written <= 1.1 * lines
