# SPDX-License-Identifier: Apache-2.0
"""Ends MLX's command buffers before the work in one takes too long."""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from metal_kernels.command_buffers import DISPATCHES_OF_A_LAYER, most_dispatches

# macOS kills a process whose command buffer uses the GPU for seconds. MLX ends a command buffer
# after a number of dispatches, however long each takes, or at the end of an evaluation; its limit
# on elements is disabled (command_buffers). So a step with much work evaluates its queue in parts,
# without waiting. Decode steps are not paced.

#: Maximum FLOPs of attention in a command buffer, and so in one dispatch. macOS killed a process
#: for one attention dispatch beyond 65k keys (mlx#3302; limits of 1 to 5 s are reported). The
#: slowest supported GPU, an M1 with 7 cores, does 2.3 TFLOP/s. If attention reaches a quarter of
#: that, these FLOPs take 0.5 s.
MOST_WORK = 2**38
_DISPATCHES = most_dispatches()
#: Layers that at least partly share a command buffer in steps without pacing.
_LAYERS = -(-_DISPATCHES // DISPATCHES_OF_A_LAYER)
#: Maximum FLOPs of matrix products in a command buffer: 0.5 s on that GPU at 60 % of its speed.
_MOST_PRODUCTS = 0.69e12
#: FLOPs of an 8B model's products per layer and row: 2 for each of 218 M weights.
_PRODUCTS = 0.44e9
#: From this number of rows, each layer of a step gets its own command buffer. Decode steps with
#: vLLM's default --max-num-seqs, 256, stay below it with up to 85 dispatches.
_ROWS = int(_MOST_PRODUCTS * DISPATCHES_OF_A_LAYER / (_DISPATCHES * _PRODUCTS))
#: Command buffers that may be pending. MLX only waits for those that its own limits ended; without
#: this bound it would hold the arrays of a whole step at once.
IN_FLIGHT = 2


class Pace:
    """Limits the work per command buffer and the pending command buffers of one network."""

    def __init__(self, most_work: int = MOST_WORK) -> None:
        self._most_work = most_work
        self._work = 0  # FLOPs of attention since the last command buffer ended
        self._ends: deque[mx.array] = deque()

    def end(self, *done: mx.array) -> None:
        """Ends the command buffer that computes `done`; waits if more than two are then pending."""
        mx.async_eval(*done)
        self._work = 0
        # Stays alive until waited for, so the first array of `done` should be small.
        self._ends.append(done[0])
        if len(self._ends) > IN_FLIGHT:
            mx.eval(self._ends.popleft())

    def before(self, work: int, *done: mx.array) -> None:
        """Ends the command buffer with `done` if `work` more FLOPs would exceed its limit."""
        if done and self._work + work > self._most_work:
            self.end(*done)
        self._work += work


def pace_of(pace: Pace, num_rows: int, work: int) -> Pace | None:
    """Returns `pace` if a step needs pacing, else None; work: FLOPs of a layer's attention."""
    # Unpaced work shares a command buffer with as much work of each neighboring layer.
    return pace if num_rows >= _ROWS or work > MOST_WORK // _LAYERS else None
