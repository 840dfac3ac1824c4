# SPDX-License-Identifier: Apache-2.0
"""Ends MLX's command buffers before the work in one takes too long.

macOS kills a process whose command buffer keeps the GPU for seconds. MLX ends a command buffer
after 40 to 50 dispatches, however long each takes, or where an evaluation ends. So a step of much
work evaluates what it has queued as it goes, without waiting for it. Decode steps are left alone.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

#: The most FLOPs of attention in a command buffer, and so in one dispatch. macOS killed a process
#: for one attention dispatch past 65k keys (mlx#3302; limits of 1 to 5 s are reported). The slowest
#: GPU served, of an M1 with 7 cores, does 2.3 TFLOP/s. If attention reaches a quarter of that, so
#: many FLOPs take 0.5 s.
MOST_WORK = 2**38
#: From so many rows on, each layer of a step gets a command buffer of its own. Otherwise 50
#: dispatches, some three layers, share one; for fewer rows of an 8B model these are 0.7 TFLOP of
#: matrix products, 0.5 s on that GPU at 60 % of its speed. Decode steps of vLLM's default
#: --max-num-seqs, 256, stay below.
_ROWS = 512
#: A step is paced if a layer's attention is more than this part of MOST_WORK: MLX's 50 dispatches,
#: some three layers, hold less than MOST_WORK otherwise.
_LAYERS = 4
#: Command buffers that may wait for the device. MLX waits only for those that its own limits ended;
#: without this bound it would hold the arrays of a whole step at once.
_IN_FLIGHT = 2


class Pace:
    """Paces one network, in all its steps: it counts the work that waits for the device."""

    def __init__(self, most_work: int = MOST_WORK) -> None:
        self._most_work = most_work
        self._work = 0  # FLOPs of attention since the last command buffer ended
        self._ends: deque[mx.array] = deque()

    def end(self, *done: mx.array) -> None:
        """Ends the command buffer after what computes `done`, then waits for the last but two.

        Keeps the first of `done` alive until then, so that one should be small.
        """
        mx.async_eval(*done)
        self._work = 0
        self._ends.append(done[0])
        if len(self._ends) > _IN_FLIGHT:
            mx.eval(self._ends.popleft())

    def before(self, work: int, *done: mx.array) -> None:
        """Makes room for `work` FLOPs about to be queued; `done` was queued before them."""
        if done and self._work + work > self._most_work:
            self.end(*done)
        self._work += work


def pace_of(pace: Pace, num_rows: int, work: int) -> Pace | None:
    """`pace` if a step needs pacing, else None.

    Args:
        pace: of the network.
        num_rows: of the step.
        work: FLOPs of a layer's attention.
    """
    return pace if num_rows >= _ROWS or work > MOST_WORK // _LAYERS else None
