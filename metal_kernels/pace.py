# SPDX-License-Identifier: Apache-2.0
"""Ends MLX's command buffers before the work in one takes too long.

macOS kills a process whose command buffer keeps the GPU for seconds. MLX ends a command buffer
after so many dispatches, however long each takes, or where an evaluation ends; its limit on
elements is out of the way (command_buffers). So a step of much work evaluates what it has queued as
it goes, without waiting for it. Decode steps are left alone.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from metal_kernels.command_buffers import DISPATCHES_OF_A_LAYER, most_dispatches

#: The most FLOPs of attention in a command buffer, and so in one dispatch. macOS killed a process
#: for one attention dispatch past 65k keys (mlx#3302; limits of 1 to 5 s are reported). The slowest
#: GPU served, of an M1 with 7 cores, does 2.3 TFLOP/s. If attention reaches a quarter of that, so
#: many FLOPs take 0.5 s.
MOST_WORK = 2**38
_DISPATCHES = most_dispatches()
#: Layers that share a command buffer where a step is not paced, in part or whole.
_LAYERS = -(-_DISPATCHES // DISPATCHES_OF_A_LAYER)
#: The most FLOPs of matrix products in a command buffer: 0.5 s on that GPU at 60 % of its speed.
_MOST_PRODUCTS = 0.69e12
#: FLOPs of the products of a layer and row, by an 8B model: 2 for each of 218 M weights.
_PRODUCTS = 0.44e9
#: From so many rows on, each layer of a step gets a command buffer of its own. Decode steps of
#: vLLM's default --max-num-seqs, 256, stay below with up to 98 dispatches.
_ROWS = int(_MOST_PRODUCTS * DISPATCHES_OF_A_LAYER / (_DISPATCHES * _PRODUCTS))
#: Command buffers that may wait for the device. MLX waits only for those that its own limits ended;
#: without this bound it would hold the arrays of a whole step at once.
IN_FLIGHT = 2


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
        if len(self._ends) > IN_FLIGHT:
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
    # What is not paced shares a command buffer with as much of the layers beside it.
    return pace if num_rows >= _ROWS or work > MOST_WORK // _LAYERS else None
