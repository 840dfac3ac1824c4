# SPDX-License-Identifier: Apache-2.0
"""Ends MLX's command buffers where what they hold takes long.

macOS ends a process whose command buffer keeps the GPU for seconds, and MLX ends one after 40 to 50
dispatches, however long each takes, or once an evaluation does. So a step of much work evaluates
what it has queued as it goes, without waiting for it. A decode step has nothing to do with this.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

#: FLOPs of attention in a command buffer, at most, and so of one dispatch. One attention dispatch
#: past 65k keys was enough for macOS (mlx#3302; limits of 1 to 5 s are reported). The slowest GPU
#: served, of an M1 with 7 cores, does 2.3 TFLOP/s; at a quarter of that, which attention may get
#: out of it, this takes 0.5 s.
MOST_WORK = 2**38
#: Rows from which on a step's layers get command buffers of their own. 50 dispatches are three
#: layers, which for fewer rows of an 8B model are 0.7 TFLOP of products: 0.5 s on that GPU at 60 %
#: of its speed. Decodes of vLLM's default --max-num-seqs, 256, stay below.
_ROWS = 512
#: What 50 dispatches may hold of attention without a bound, as a part of MOST_WORK a layer.
_LAYERS = 4
#: Command buffers that may wait for the device. MLX itself waits only for those that its own limits
#: ended, so that it would otherwise hold the arrays of a whole step at once.
_IN_FLIGHT = 2


class Pace:
    """Of one network, in all its steps: it counts what waits for the device at once."""

    def __init__(self, most_work: int = MOST_WORK) -> None:
        self._most_work = most_work
        self._work = 0  # of attention since the last end
        self._ends: deque[mx.array] = deque()

    def end(self, *done: mx.array) -> None:
        """Ends the command buffer with what computes `done`; waits for the last but two.

        The first of `done` is held on to until then: it should be small.
        """
        mx.async_eval(*done)
        self._work = 0
        self._ends.append(done[0])
        if len(self._ends) > _IN_FLIGHT:
            mx.eval(self._ends.popleft())

    def before(self, work: int, *done: mx.array) -> None:
        """Makes room for `work` FLOPs that are about to be queued; `done` is what was before."""
        if done and self._work + work > self._most_work:
            self.end(*done)
        self._work += work


def pace_of(pace: Pace, num_rows: int, work: int) -> Pace | None:
    """`pace`, where a step needs one.

    Args:
        pace: of the network.
        num_rows: of the step.
        work: FLOPs of a layer's attention.
    """
    return pace if num_rows >= _ROWS or work > MOST_WORK // _LAYERS else None
