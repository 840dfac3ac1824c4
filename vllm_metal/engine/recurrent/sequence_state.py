# SPDX-License-Identifier: Apache-2.0
"""States of layers whose modules are called once for all rows; drafts leave their inputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import mlx.core as mx

from vllm_metal.engine.kv_cache.kernels import KernelKVCache
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import Pending
from vllm_metal.engine.recurrent.recurrent_state import RecurrentState, StateFormat
from vllm_metal.engine.recurrent.sequence_calls import ByKernels, ByOperations
from vllm_metal.engine.recurrent.sequence_plan import SequencePlan
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall

TreeT = TypeVar("TreeT")


class SequenceState(RecurrentState[SequencePlan]):
    """States that our own operations compute, and the rows that each layer's newest step kept."""

    def __init__(
        self, storage: LayerKVCache, form: StateFormat, idle: Callable[[SequenceCall], None]
    ) -> None:
        """
        Args:
            storage, form: see RecurrentState.
            idle: the layer's operations, over rows of zeros.
        """
        super().__init__(storage, form)
        self._idle = idle
        self._kept: dict[int, list[mx.array]] = {}  # by scope, of the layer that has it

    @property
    def _kernels(self) -> KernelKVCache | None:
        """The storage, if kernels compute the states where they lie."""
        storage = self._storage
        return (
            storage
            if isinstance(storage, KernelKVCache) and storage.backend.computes_states
            else None
        )

    @property
    def by_kernels(self) -> bool:
        """Whether kernels compute the states where they lie."""
        return self._kernels is not None

    @property
    def long_prompt(self) -> int | None:
        """Rows from which on a prompt may go by MLX's function in chunks; None: none does."""
        return None if self._kernels is None else self._kernels.backend.long_prompt

    def begin_step(self) -> None:
        pending, self._pending = self._pending, []
        for left in pending:
            self._kept.pop(left.plan.scope, None)
            groups = left.plan.groups
            num_ended = 0 if groups is None else len(self.form.shapes)
            if kept := left.arrays[num_ended:]:
                self._kept[left.plan.scope] = kept
            if groups is not None and len(groups.ends_blocks_np):
                self.write(groups.ends_blocks_np, left.arrays[:num_ended])

    @property
    def inputs(self) -> list[mx.array]:
        """Kept rows, layer by layer; states are read from the storage, which lists its own."""
        return [array for kept in self._kept.values() for array in kept]

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        kept, given = self._kept, iter(inputs)
        self._kept = {scope: [next(given) for _ in arrays] for scope, arrays in kept.items()}
        try:
            with super().traced(inputs):
                yield
        finally:
            self._kept = kept

    def call(
        self, plan: SequencePlan, module: Callable[[SequenceCall], TreeT]
    ) -> tuple[TreeT, list[mx.array]]:
        """A layer's call over the step's rows.

        Args:
            plan: of the step.
            module: computes, with what goes from token to token left to its argument.

        Returns:
            What the module returns; and arrays that must be computed with it.
        """
        kept = self._kept.get(plan.scope, []) if plan.applies else []
        call: ByKernels | ByOperations
        if self._kernels is not None:
            call = ByKernels(self._kernels, self.form, plan, kept)
        else:
            assert plan.reads is not None
            call = ByOperations(self.read(plan, plan.reads), self.form, plan, kept)
        found = module(call)
        arrays = call.left
        self._pending.append(Pending(plan, arrays))
        return found, arrays

    def settle(self, plan: SequencePlan) -> None:
        """Applies kept rows in a step without rows."""
        if plan.scope in self._kept:  # else the layer was not called in the step before
            self.call(plan, self._idle)
