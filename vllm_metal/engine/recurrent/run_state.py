# SPDX-License-Identifier: Apache-2.0
"""States of layers that are called once per run; keeps one state per draft."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import Pending, Restorable, joined
from vllm_metal.engine.recurrent.recurrent_state import RecurrentState, StateFormat
from vllm_metal.engine.recurrent.run_plan import Run, RunPlan

#: Tokens of a sequence from which copying its last state costs less than keeping all states alive.
_LONG = 16


class RunState(RecurrentState[RunPlan], Restorable):
    """States computed by an mlx-lm module, called once for each run of sequences.

    A step's states are written when the next one begins: by then the accepted drafts are known.
    Without drafts, a `pipelined` storage need not wait for them.
    """

    def __init__(self, storage: LayerKVCache, form: StateFormat) -> None:
        super().__init__(storage, form)
        self._last_rows_np: np.ndarray | None = None

    def begin_step(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        last_rows_np, self._last_rows_np = self._last_rows_np, None
        blocks, states = [], []
        for written in pending:
            endings = written.plan.endings
            wanted = endings.wanted(last_rows_np)
            blocks.append(endings.blocks_np[wanted])
            everything = len(wanted) == len(endings.blocks_np)
            indices = mx.array(wanted.astype(np.int32))
            states.append(
                written.arrays if everything else [part[indices] for part in written.arrays]
            )
        blocks_np = np.concatenate(blocks)
        if len(blocks_np):
            parts = [joined(parts) for parts in zip(*states, strict=True)]
            self.write(blocks_np, parts)

    def restore(self, last_rows_np: np.ndarray) -> None:
        self._last_rows_np = last_rows_np

    def run(
        self,
        plan: RunPlan,
        compute: Callable[[mx.array, list[mx.array]], tuple[list[mx.array], list[mx.array]]],
    ) -> list[mx.array]:
        """Calls a layer for the step's tokens, run by run.

        Args:
            compute: takes [n, L] int32 indices of tokens and the [n, *shape] parts of the states
                before them; returns the layer's results, each [n, L, ...], and the parts of the
                states after them.

        Returns:
            The results, each [T, 1, ...].
        """
        states = self.read(plan, plan.before)
        if plan.fresh is not None:
            states = [_zero_where(plan.fresh, part) for part in states]
        results: list[list[mx.array]] = []
        ended: list[list[mx.array]] = []
        for run in plan.runs:
            of_run = states if run.requests is None else [part[run.requests] for part in states]
            found, after = compute(run.rows, of_run)
            dtypes = self.form.dtypes
            after = [part.astype(dtype) for part, dtype in zip(after, dtypes, strict=True)]
            results.append([result.flatten(0, 1)[:, None] for result in found])
            ended.append([_ending(run, part) for part in after])
            if run.requests is None:
                states = after
            else:
                states = [
                    _put(part, run.requests, new) for part, new in zip(states, after, strict=True)
                ]
        kept = [joined(parts) for parts in zip(*ended, strict=True)]
        self._pending.append(Pending(plan, kept))
        whole = [joined(parts) for parts in zip(*results, strict=True)]
        # Evaluate the states with the results; otherwise the arrays that they are slices of stay
        # alive until the next step begins.
        whole = mx.depends(whole, kept)
        return whole if plan.order is None else [result[plan.order] for result in whole]


def _ending(run: Run, part: mx.array) -> mx.array:
    """Selects the end states that later steps may need from [n, ...] states after a run."""
    if run.kept is not None:
        return part[run.kept]
    if run.rows.shape[1] < _LONG:
        return part
    # Copy: the part may be a view of the module's whole input.
    return mx.take(part, mx.arange(len(part)), 0)


def _zero_where(fresh: mx.array, part: mx.array) -> mx.array:
    return mx.where(fresh.reshape(-1, *[1] * (part.ndim - 1)), mx.zeros((), part.dtype), part)


def _put(part: mx.array, requests: mx.array, new: mx.array) -> mx.array:
    """Returns a copy of `part`, [R, ...], with `requests` replaced by `new`, [n, ...]."""
    copied = mx.contiguous(part)  # a copy, as the original may still be needed
    copied[requests] = new
    return copied
