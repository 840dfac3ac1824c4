# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: their state in the KV cache, and the calls of the modules that compute it.

The model gets a batch of T tokens of length 1. If a module's recurrent operations are known
(`mlx_patches.recurrences`), it is called once with all tokens as one sequence, and our operations
replace the recurrent ones (`SequenceLayer`). Other modules are called once per run of sequences of
equal length (`RunPlan`), with their states in mlx-lm's own cache, and the results are put back in
token order (`RunLayer`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import ArraysCache
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from metal_kernels.layout import BLOCK_SIZES
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import Case
from vllm_metal.engine.attention import forward_inputs
from vllm_metal.engine.attention.recurrent_ops import RecurrentOps, traced_ops
from vllm_metal.engine.kv_cache import formats
from vllm_metal.engine.kv_cache.kernels import KernelBackend, KernelKVCache
from vllm_metal.engine.kv_cache.layer_cache import KVBackend, LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import (
    LayerState,
    PlanT,
    StepLayout,
    StepScope,
    Storage,
)
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.recurrent.recurrent_state import RecurrentState, StateFormat
from vllm_metal.engine.recurrent.run_plan import RunPlan
from vllm_metal.engine.recurrent.run_state import RunState
from vllm_metal.engine.recurrent.sequence_plan import SequencePlan, SequenceScope
from vllm_metal.engine.recurrent.sequence_state import SequenceState
from vllm_metal.patches.mlx_patches import library_kernels, module_calls, recurrences
from vllm_metal.patches.mlx_patches.module_calls import ModuleCall, SequenceCache
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall, handed_to

#: For models without attention layers, whose states are in float32 memory (`allocate_states`).
_STATES_ALONE = Case(
    AttentionShape(1, 1, 64, 64),
    mx.float32,
    mx.float32,
    BLOCK_SIZES[0],
    kernels=("kv_write", "kv_blocks", "kv_states", "decode", "prefill", "reduce", "graph"),
)
#: Kernels of recurrent layers, and the timing that compares them with MLX's operations.
_OF_SEQUENCES = ("convolution", "recurrence", "recurrence_way")
_TRIAL_BLOCKS = 2
_CONTEXT = "the state at its newest token"
StateT = TypeVar("StateT", bound=RecurrentState)


@dataclass(frozen=True)
class RecurrentLayer(StatefulLayer):
    """The cache of one recurrent layer: a fixed-size state per request."""

    form: StateFormat
    library_calls: tuple[library_kernels.Call, ...] = ()  # calls in the whole model

    @property
    def kind(self) -> Hashable:
        """The layer's class; layers of one class share plans, whatever their states' format."""
        return type(self)

    @property
    def storage_key(self) -> StateFormat:
        return self.form

    @property
    def context(self) -> Hashable:
        return _CONTEXT

    def spec(self, block_size: int, elements: mx.Dtype, whole_context: bool = False) -> KVCacheSpec:
        """Returns a spec for vLLM's "align" mode, which also works without prefix caching."""
        return MambaSpec(
            block_size=block_size,
            shapes=((self.form.nbytes,),),
            dtypes=(formats.pool_format(mx.uint8).torch_dtype,),
            mamba_cache_mode="align",
        )

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> RecurrentState:
        return self.share(backend.allocate_states(num_blocks, self.form.nbytes))

    @property
    def state_bytes(self) -> int:
        return self.form.nbytes

    @abstractmethod
    def share(self, storage: Storage, part: int = 0) -> RecurrentState: ...

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        if host is None:
            return [_STATES_ALONE]
        found = host.cases(dtype, elements, block_size)
        return [replace(case, kernels=("kv_states",)) for case in found]

    def _trial_state(
        self,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None,
    ) -> RecurrentState:
        """Allocates a state in the same kind of storage as the pool's."""
        pool = _TRIAL_BLOCKS, block_size, elements, backend
        if host is None:
            return self.allocate(*pool)
        return self.share(host.allocate(*pool).storage)

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterator[tuple[Hashable, Callable[[], mx.array]]]:
        if backend.pipelined:
            state = partial(self._trial_state, elements, block_size, backend, host)
            place = None if host is None else host.storage_key
            yield (place, self.form.nbytes), lambda: state().move(0, 1)


@dataclass(frozen=True)
class RunLayer(RecurrentLayer):
    """A layer whose module is called once for each run of sequences."""

    def share(self, storage: Storage, part: int = 0) -> RunState:
        assert isinstance(storage, LayerKVCache)
        return RunState(storage, self.form)

    def scope(self, state: LayerState) -> StepScope:
        return StepScope(RunPlan.from_layout)

    def cache(self, state: LayerState, scope: StepScope) -> RunCache:
        assert isinstance(state, RunState)
        return RunCache(state, scope)


@dataclass(frozen=True)
class SequenceLayer(RecurrentLayer):
    """A layer whose module is called once for all tokens of a step."""

    ops: RecurrentOps = field(default_factory=RecurrentOps)
    #: Largest kernel size of the model's convolutions, whose layers share plans; 0: this layer's.
    most_taps: int = 0

    def share(self, storage: Storage, part: int = 0) -> SequenceState:
        assert isinstance(storage, LayerKVCache)
        return SequenceState(storage, self.form, self.ops.repeat)

    def scope(self, state: LayerState) -> SequenceScope:
        assert isinstance(state, SequenceState)
        return SequenceScope(state.by_kernels, self.num_taps, state.long_prompt)

    @property
    def num_taps(self) -> int:
        """Kernel size for which plans are made."""
        taps = (convolution.taps for convolution in self.ops.convolutions)
        return max(self.most_taps, *taps, 1)

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        found = super().cases(dtype, elements, block_size, host)
        memory = Case(found[0].shape, dtype, found[0].cache_dtype, found[0].block_size)
        return found + [
            replace(memory, dtype=rows, kernels=_OF_SEQUENCES, states=kind)
            for rows, kind in self.ops.kinds(self.form)
        ]

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterator[tuple[Hashable, Callable[[], mx.array]]]:
        computes = isinstance(backend, KernelBackend) and backend.computes_states
        in_chunks = isinstance(backend, KernelBackend) and backend.long_prompt
        if in_chunks or not computes:
            yield from super().trials(dtype, elements, block_size, backend, host)
        if computes and self.ops != RecurrentOps():
            state = partial(self._trial_state, elements, block_size, backend, host)
            place = None if host is None else host.storage_key
            yield (
                (place, self.form, self.ops),
                lambda: self._compute_once(state(), block_size),
            )

    def _compute_once(self, state: RecurrentState, block_size: int) -> mx.array:
        """Launches the kernels for one token of one request."""
        assert isinstance(state, SequenceState) and isinstance(state.storage, KernelKVCache)
        one, scope = np.ones(1, np.int32), self.scope(state)
        layout = StepLayout(
            np.array([0, 1], np.int32), one, one[:, None], one * block_size, block_size,
            req_indices_np=one,
        )  # fmt: skip
        state.call(scope.plan_of(layout), self.ops.repeat)
        return mx.stack(list(state.storage.fences))

    def cache(self, state: LayerState, scope: StepScope) -> RowsCache:
        assert isinstance(state, SequenceState)
        return RowsCache(state, scope)


class _StepCache(SequenceCache, Generic[StateT, PlanT]):
    """Replaces mlx-lm's ArraysCache of a layer."""

    def __init__(self, state: StateT, scope: StepScope[PlanT]) -> None:
        """`scope` is the current step; outside of one, every call raises RuntimeError."""
        self._state = state
        self._scope = scope

    @property
    def offset(self) -> mx.array:
        """[T] int32, each token's position, for models without attention."""
        return self._scope.positions


class RowsCache(_StepCache[SequenceState, SequencePlan]):
    """Replaces the ArraysCache of a layer that is called once for all tokens of a step."""

    def call(self, module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        num_rows = self._scope.positions.size

        def run(call: SequenceCall) -> Any:
            swapped = tree_map(lambda leaf: call if leaf is self else leaf, (list(args), kwargs))
            new_args, new_kwargs = _one_sequence_of(swapped, num_rows)
            with handed_to(call), forward_inputs.as_one_sequence():
                return module(*new_args, **new_kwargs)

        found, left = self._state.call(self._scope.plan, run)
        results, rebuilt = _results_of(found)
        # Evaluate `left` with the results, or its inputs stay alive until the next step.
        return rebuilt(mx.depends([result.swapaxes(0, 1) for result in results], left))


def _one_sequence_of(tree: Any, num_rows: int) -> Any:
    """Reshapes [T, 1, ...] arguments to [1, T, ...]."""

    def regrouped(leaf: Any) -> Any:
        if isinstance(leaf, mx.array) and leaf.shape[:2] == (num_rows, 1):
            return leaf.swapaxes(0, 1)
        return leaf

    return tree_map(regrouped, tree)


class RunCache(_StepCache[RunState, RunPlan]):
    """Replaces the ArraysCache of a layer that is called once per run of equally long texts."""

    def call(self, module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        num_rows = self._scope.positions.size
        rebuilt: Any = None  # the same for all runs

        def compute(
            rows: mx.array, states: list[mx.array]
        ) -> tuple[list[mx.array], list[mx.array]]:
            nonlocal rebuilt
            cache: Any = ArraysCache(len(states))
            cache.cache = list(states)  # which the module writes into
            swapped = tree_map(lambda leaf: cache if leaf is self else leaf, (list(args), kwargs))
            new_args, new_kwargs = _sequences_of(swapped, rows, num_rows)
            with forward_inputs.regrouped(rows):
                results = module(*new_args, **new_kwargs)
            found, rebuilt = _results_of(results)
            return found, cache.cache

        computed = self._state.run(self._scope.plan, compute)
        return rebuilt(computed)  # set by `compute`


def _sequences_of(tree: Any, rows: mx.array, num_rows: int) -> Any:
    """Regroups [T, 1, ...] arguments to [n, L, ...] sequences of tokens `rows`, [n, L] int32.

    [T] integers are positions: a sequence gets its first one.
    """

    def regrouped(leaf: Any) -> Any:
        if isinstance(leaf, mx.array) and leaf.shape[:2] == (num_rows, 1):
            return leaf[:, 0][rows]
        if isinstance(leaf, mx.array) and leaf.shape == (num_rows,) and leaf.dtype == mx.int32:
            return leaf[rows[:, 0]]
        return leaf

    return tree_map(regrouped, tree)


def _results_of(tree: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """Flattens a module's results; returns the arrays, and a function that undoes it."""
    if isinstance(tree, mx.array):
        return [tree], lambda arrays: arrays[0]
    named = cast(list[tuple[str, mx.array]], tree_flatten(tree))
    names = [name for name, _ in named]

    def rebuilt(arrays: Sequence[mx.array]) -> Any:
        found = tree_unflatten(list(zip(names, arrays, strict=True)))
        return type(tree)(found)

    return [array for _, array in named], rebuilt


class RecurrentProbe(ArraysCache):
    """A `Probe` that records a layer's state, and which module computes it."""

    def __init__(self, cache: ArraysCache) -> None:
        """Takes mlx-lm's cache of the layer."""
        super().__init__(len(cache.cache))
        self._common: list[ModuleCall] | None = None
        self.offset = mx.zeros(1, mx.int32)

    def __getitem__(self, index: int) -> Any:
        self._note()
        return super().__getitem__(index)

    def __setitem__(self, index: int, value: Any) -> None:
        self._note()
        super().__setitem__(index, value)

    def _note(self) -> None:
        """Records the module calls that enclose all accesses to the cache."""
        calls = module_calls.under_way()
        if self._common is None:
            self._common = calls
        both = zip(self._common, calls, strict=False)
        same = [one is other for one, other in both]
        self._common = self._common[: ([*same, False]).index(False)]

    def check_shapes_of(self, other: RecurrentProbe, name: str) -> None:
        """Raises NotImplementedError if the state's shapes depend on the number of tokens."""
        kept = [
            [None if part is None else part.shape for part in probe.cache]
            for probe in (self, other)
        ]
        if kept[0] != kept[1]:
            raise NotImplementedError(
                f"keeps a state in {name} that grows with its tokens, which is not supported"
            )

    def layer(self, name: str) -> RecurrentLayer:
        parts: list[Any] = self.cache
        if not self._common or any(part is None for part in parts):
            raise NotImplementedError(
                f"leaves a part of the state of {name} empty, which is not supported"
            )
        call = self._common[-1]
        # A module that gets all caches of a layer attends, too: those known are called once a step.
        known = recurrences.known(call.module)
        if not any(each is self for each in (call.caches if known else call.arguments)):
            raise NotImplementedError(
                f"computes attention and a recurrence in one module in {name}, which is not "
                "supported"
            )
        module_calls.ask_caches(type(call.module))
        form = StateFormat(
            tuple(part.shape[1:] for part in parts), tuple(part.dtype for part in parts)
        )
        if not known:
            return RunLayer(name, form)
        recurrences.hand_over(call.module)
        return SequenceLayer(name, form, ops=traced_ops(call, self, form))
