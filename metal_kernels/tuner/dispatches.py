# SPDX-License-Identifier: Apache-2.0
"""Times a decode step's chain of small dispatches with one of MLX's command-buffer limits."""

from __future__ import annotations

import mlx.core as mx

from metal_kernels.command_buffers import DISPATCHES_OF_A_LAYER, MOST_DISPATCHES
from metal_kernels.tuner.choice import ProcessChoice
from metal_kernels.tuner.search import Found, Measure, best_of
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

#: Candidates for dispatches per command buffer; MLX's defaults are 40 and 50.
VALUES = (50, 100, 200, 500, 1000)
_LAYERS = 32
_SIZE = 4096  # elements of each array, like a row of an 8B model


def search(measure: Measure[int], current: int) -> Found[int]:
    """Returns the number of dispatches per command buffer with the fastest step.

    measure: times a step with such a limit, in its own process. current: the current limit.
    """
    return best_of(measure, sorted({*VALUES, current}), current)


def time_step(stopwatch: Stopwatch, layers: int = _LAYERS) -> Timing:
    """Times the dispatches of `layers` layers, each of which waits for the previous one."""
    weights = mx.ones((_SIZE,))
    mx.eval(weights)

    def run(count: int) -> None:
        for _ in range(count):
            row = weights
            for _ in range(layers * DISPATCHES_OF_A_LAYER // 2):
                # Two kernels that MLX does not fuse.
                row = mx.fast.rms_norm(row, weights, 1e-6) + weights
            mx.eval(row)

    return stopwatch.time(f"{layers * DISPATCHES_OF_A_LAYER} dispatches in a row", run)


CHOICE = ProcessChoice("dispatches of a command buffer", search, time_step, MOST_DISPATCHES)
