# SPDX-License-Identifier: Apache-2.0
"""States of layers that are called once for all tokens; for drafts, only inputs are kept."""

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
    """States computed by our own operations, and the rows kept by each layer's newest step."""

    def __init__(
        self, storage: LayerKVCache, form: StateFormat, idle: Callable[[SequenceCall], None]
    ) -> None:
        """`idle` runs the layer's operations on zeros, for steps without tokens."""
        super().__init__(storage, form)
        self._idle = idle
        self._kept: dict[int, list[mx.array]] = {}  # by scope of the layer

    @property
    def _kernels(self) -> KernelKVCache | None:
        """The storage, if kernels update states in place."""
        storage = self._storage
        return (
            storage
            if isinstance(storage, KernelKVCache) and storage.backend.computes_states
            else None
        )

    @property
    def by_kernels(self) -> bool:
        return self._kernels is not None

    @property
    def long_prompt(self) -> int | None:
        """Fewest tokens of a prompt for MLX's chunked function; None: never."""
        return None if self._kernels is None else self._kernels.backend.long_prompt

    def begin_step(self) -> None:
        pending, self._pending = self._pending, []
        for left in pending:
            self._kept.pop(left.plan.scope, None)
            groups = left.plan.groups
            # Without kernels, end states come first (see `ByOperations.left`).
            num_ended = 0 if groups is None else len(self.form.shapes)
            if kept := left.arrays[num_ended:]:
                self._kept[left.plan.scope] = kept
            if groups is not None and len(groups.ends_blocks_np):
                self.write(groups.ends_blocks_np, left.arrays[:num_ended])

    @property
    def inputs(self) -> list[mx.array]:
        """Kept rows, layer by layer; the storage itself lists the arrays that hold the states."""
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
        """Calls a layer for the step's tokens.

        `module` takes a SequenceCall, which runs its recurrent operations. Returns the module's
        result, and arrays that must be evaluated with it.
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

    def flush(self, plan: SequencePlan) -> None:
        """Applies kept rows in a step without tokens."""
        if plan.scope in self._kept:  # else the layer did not run in the previous step
            self.call(plan, self._idle)
