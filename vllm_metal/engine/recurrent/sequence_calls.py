# SPDX-License-Identifier: Apache-2.0
"""Computes a module's recurrent operations with kernels on the pool's blocks, or with MLX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from metal_kernels import convolution, recurrence
from metal_kernels.convolution import reference as convolution_reference
from metal_kernels.recurrence import reference as recurrence_reference
from metal_kernels.sequences import RecurrenceInputs, StatePart
from vllm_metal.engine.kv_cache.kernels import KernelKVCache
from vllm_metal.engine.recurrent import long_prompts
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.engine.recurrent.sequence_plan import SequencePlan
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall


class Call(SequenceCall):
    """One layer's call in a step; its operations use the parts of a state in order."""

    def __init__(self, form: StateFormat, plan: SequencePlan, kept: Sequence[mx.array]) -> None:
        """`kept` are rows of the previous step, in the order of the operations."""
        super().__init__(form.shapes, form.dtypes)
        self.form, self.plan = form, plan
        self._parts = iter(form.parts)
        self._given, self._applied = iter(kept), bool(kept)
        self._kept: list[mx.array] = []

    def convolve(self, inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        part = next(self._parts)
        (kept,) = self._before(1)
        out, left = self._convolve(part, inputs, kept, weight, bias)
        self._keep(left, kept)
        return out

    def recur(
        self,
        queries: mx.array,
        inputs: RecurrenceInputs,
        delta: bool,
        log_rates: mx.array | None = None,
    ) -> mx.array:
        shape = (*inputs.values.shape[1:], inputs.keys.shape[-1])
        part = replace(next(self._parts), shape=shape)  # some modules omit a size-1 axis
        names = [array is not None for array in _arrays(inputs)]
        before = self._before(sum(names))
        given = iter(before)
        kept = None
        if before[0] is not None:
            arrays: list[Any] = [next(given) if there else None for there in names]
            kept = RecurrenceInputs(*arrays)
        y, left = self._recur(part, queries, inputs, kept, delta, log_rates)
        for array, old in zip((a for a in _arrays(left) if a is not None), before, strict=True):
            self._keep(array, old)
        return y

    def _before(self, count: int) -> list[mx.array | None]:
        return [next(self._given) if self._applied else None for _ in range(count)]

    def _keep(self, rows: mx.array, before: mx.array | None) -> None:
        if not self.plan.keeps:
            return
        if self.plan.carried is not None:
            assert before is not None
            rows = mx.concatenate([rows, before[self.plan.carried]])
        self._kept.append(rows)

    @property
    def left(self) -> list[mx.array]:
        """Kept rows, which the next step applies."""
        return self._kept

    @abstractmethod
    def _convolve(
        self,
        part: StatePart,
        inputs: mx.array,
        kept: mx.array | None,
        weight: mx.array,
        bias: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Returns [T, C] results and [num_kept, C] rows to keep."""

    @abstractmethod
    def _recur(
        self,
        part: StatePart,
        queries: mx.array,
        inputs: RecurrenceInputs,
        kept: RecurrenceInputs | None,
        delta: bool,
        log_rates: mx.array | None,
    ) -> tuple[mx.array, RecurrenceInputs]:
        """Returns [T, HV, DV] results and rows to keep."""


class ByKernels(Call):
    """Updates states in place with our kernels."""

    def __init__(
        self,
        storage: KernelKVCache,
        form: StateFormat,
        plan: SequencePlan,
        kept: Sequence[mx.array],
    ) -> None:
        super().__init__(form, plan, kept)
        self._storage = storage

    def _convolve(
        self,
        part: StatePart,
        inputs: mx.array,
        kept: mx.array | None,
        weight: mx.array,
        bias: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        def launch(
            pools: list[mx.array], split: int, after: Sequence[mx.array]
        ) -> tuple[tuple[mx.array, mx.array], mx.array]:
            out, left, fence = convolution.run(
                *(self.plan.sequences, inputs, kept, weight, bias, pools, part, split, after),
                # A layer's first convolution clears the rest of the block after the state.
                state_bytes=None if part.start else self.form.end,
            )
            return (out, left), fence

        return self._storage.update_states(self.plan, launch)

    def _recur(
        self,
        part: StatePart,
        queries: mx.array,
        inputs: RecurrenceInputs,
        kept: RecurrenceInputs | None,
        delta: bool,
        log_rates: mx.array | None,
    ) -> tuple[mx.array, RecurrenceInputs]:
        long = self.plan.long
        if long is not None and not long_prompts.fits(inputs, part.dtype, delta):
            long = None

        def launch(
            pools: list[mx.array], split: int, after: Sequence[mx.array]
        ) -> tuple[tuple[mx.array, RecurrenceInputs], mx.array]:
            y, left, fence = recurrence.run(
                self.plan.sequences if long is None else long.others,
                *(queries, inputs, kept, pools, part, delta, log_rates),
                split=split,
                after=after,
            )
            return (y, left), fence

        y, left = self._storage.update_states(self.plan, launch)
        if long is not None:
            rows = queries, inputs
            y = long_prompts.recur(long, self.plan, self._storage, self.form, rows, y)
        return y, left


class ByOperations(Call):
    """Computes with MLX on states read from the pool; new states are written later."""

    def __init__(
        self,
        states: Sequence[mx.array],
        form: StateFormat,
        plan: SequencePlan,
        kept: Sequence[mx.array],
    ) -> None:
        """`states` are [N, *shape] parts of the states before the step."""
        super().__init__(form, plan, kept)
        self._states = iter(states)
        self._ended: list[mx.array] = []

    @property
    def left(self) -> list[mx.array]:
        """Parts of the states to write, then kept rows."""
        columns = zip(self._ended, self.form.shapes, self.form.dtypes, strict=True)
        ended = [part.reshape(-1, *shape).astype(dtype) for part, shape, dtype in columns]
        return [*ended, *self._kept]

    def _convolve(
        self,
        part: StatePart,
        inputs: mx.array,
        kept: mx.array | None,
        weight: mx.array,
        bias: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        assert self.plan.groups is not None
        out, ended, left = convolution_reference.run(
            self.plan.groups, inputs, kept, weight, bias, next(self._states)
        )
        self._ended.append(ended)
        return out, left

    def _recur(
        self,
        part: StatePart,
        queries: mx.array,
        inputs: RecurrenceInputs,
        kept: RecurrenceInputs | None,
        delta: bool,
        log_rates: mx.array | None,
    ) -> tuple[mx.array, RecurrenceInputs]:
        assert self.plan.groups is not None
        states = next(self._states).reshape(-1, *part.shape)
        y, ended, left = recurrence_reference.run(
            self.plan.groups, queries, inputs, kept, states, delta, log_rates
        )
        self._ended.append(ended)
        return y, left


def _arrays(inputs: RecurrenceInputs) -> tuple[mx.array | None, ...]:
    return inputs.keys, inputs.values, inputs.rates, inputs.decays
