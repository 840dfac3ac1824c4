# SPDX-License-Identifier: Apache-2.0
"""Connects the layers of one network to the pool, step by step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.pace import Pace
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows, step_layout
from vllm_metal.engine.kv_cache.layer_state import (
    LayerState,
    Restorable,
    Run,
    StepLayout,
    StepScope,
)
from vllm_metal.engine.kv_cache.pages import BlockPages
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.models.table_rows import TableRows
from vllm_metal.engine.recurrent.sequence_plan import SequenceScope
from vllm_metal.engine.recurrent.sequence_state import SequenceState
from vllm_metal.patches.mlx_patches import rotations


class EarlierSlots:
    """Slots that earlier forwards of one submission write; later ones plan their reads by these."""

    def __init__(self, num_forwards: int, num_rows: int) -> None:
        """
        Args:
            num_forwards: the most forwards that are submitted to the device together.
            num_rows: tokens of each forward.
        """
        self._none_np = np.full((num_forwards - 1) * num_rows, -1, np.int32)
        self._by_group: dict[int, np.ndarray] = {}

    def of(self, group: int) -> np.ndarray:
        """Returns a KV cache group's slots, [E] int32; see `StepLayout.earlier_slots_np`."""
        return self._by_group.get(group, self._none_np)

    def add(self, group: int, slots_np: np.ndarray) -> None:
        """Adds the slots of a forward's tokens."""
        slots_np = np.concatenate([self.of(group), slots_np])
        self._by_group[group] = slots_np[len(slots_np) - len(self._none_np) :]


class PagedLayers:
    """The storage of one network's layers, and the current step."""

    def __init__(
        self,
        layers: Sequence[StatefulLayer],
        layer_states: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        block_size: int,
        paced: bool = True,
        begins_steps: bool = True,
    ) -> None:
        """
        Args:
            layers: the network's, in the order of its caches.
            layer_states: storage by layer name; may include other networks', which are managed too.
            group_of: KV cache group by layer name.
            block_size: tokens per block.
            paced: whether long steps end command buffers as they go; False for a forward that is
                traced but not run.
            begins_steps: False if another network's forward over the same pool begins each step.
        """
        self.block_size = block_size
        #: Rows of the step in embedding tables on disk; a network without such tables keeps this.
        self.table_rows = TableRows()
        self._pace = Pace() if paced else None
        self._begins_steps = begins_steps
        self._by_name, self._group_of = dict(layer_states), dict(group_of)
        self.layer_states = list(dict.fromkeys(layer_states.values()))
        ignored = LayerState.begin_step
        self._deferring = [x for x in self.layer_states if type(x).begin_step is not ignored]
        #: The storages that contain the layer states.
        self.storages = list(dict.fromkeys(state.storage for state in self.layer_states))
        #: Whether a step may be submitted to the device while the previous one still runs.
        self.pipelined = all(storage.pipelined for storage in self.storages)
        self._rotates = any(getattr(storage, "rotates", False) for storage in self.storages)
        self._restorable = [state for state in self.layer_states if isinstance(state, Restorable)]
        # Layers with the same block table and kind share a step's plan.
        scopes: dict[tuple[int, Hashable], StepScope] = {}
        self._caches: list[Any] = []
        for place, of_place in groupby(layers, lambda layer: layer.place):
            caches = []
            for layer in of_place:
                state, key = layer_states[layer.name], (group_of[layer.name], layer.kind)
                if key not in scopes:
                    scopes[key] = layer.scope(state)
                caches.append(layer.cache(state, scopes[key]))
            self._caches.append(caches[0] if layer.name == place else tuple(caches))
        self._scopes = [(group, scope) for (group, _), scope in scopes.items()]
        self._sequences = [each for each in scopes.values() if isinstance(each, SequenceScope)]
        #: Whether the host must know a step's accepted drafts before it prepares the next step.
        self.needs_outcome = bool(self._restorable) or not all(
            scope.by_kernels for scope in self._sequences
        )
        #: Whether `record_accepted` has any effect.
        self.keeps_states = bool(self._restorable or self._sequences)
        own = [layer_states[layer.name] for layer in layers]
        #: This network's own layer states, each after the storage that contains it.
        self.own_states = list(
            dict.fromkeys(each for state in own for each in (state.storage, state))
        )

    def update_blocks(self, zeroed: Sequence[int], copied: Sequence[tuple[int, int]]) -> None:
        """Clears blocks, then copies (source, target) blocks, before the next forward."""
        # Deferred writes come first: they may belong to blocks that are cleared or copied.
        for state in self._deferring:
            state.begin_step()
        for storage in self.storages:
            if zeroed:
                storage.clear_blocks(np.array(zeroed, np.int32))
            if copied:
                sources, targets = np.array(copied, np.int32).T
                storage.copy_blocks(sources, targets)

    def record_accepted(self, rows: Rows, last_rows_np: np.ndarray) -> None:
        """Passes a step's accepted drafts to layers with recurrent state.

        Call it in the order of the steps. `last_rows_np` is [R] int32: for each request of the
        step, the index of its last accepted token.
        """
        for state in self._restorable:
            state.restore(last_rows_np)
        for scope in self._sequences:
            scope.kept.record_accepted(rows.query_start_loc_np, last_rows_np)

    def leave(self, req_idx: int) -> None:
        """Drops a request, so that another one may take its index."""
        for scope in self._sequences:
            scope.kept.remove_request(req_idx)

    def flush_states(self, req_indices_np: np.ndarray | None = None) -> None:
        """Applies all accepted drafts that the host knows of to recurrent states in blocks.

        Call it between steps, for requests ([n] int32, None for all) whose blocks will be reused by
        the prefix cache or when the request resumes.
        """
        plans = [scope.flush_plan(req_indices_np) for scope in self._sequences]
        if not any(plans):
            return
        for state in self._deferring:
            state.begin_step()
        for plan in plans:
            for state in self.layer_states:
                if plan is not None and isinstance(state, SequenceState):
                    state.flush(plan)

    def begin_step(self) -> None:
        """Applies deferred writes to the pool, before plans of the next forward are made."""
        if self._begins_steps:
            for state in self._deferring:
                state.begin_step()

    def plans(
        self,
        rows: Rows,
        block_tables: BlockTables,
        earlier: EarlierSlots | None = None,
        runs: tuple[Run, ...] = (),
    ) -> list[object]:
        """Returns the plan of each scope for a forward.

        `earlier` are the slots of earlier forwards in the same submission, to which this one's are
        added; None for a forward that is submitted alone. `runs`: see StepLayout.
        """
        layouts: dict[int, StepLayout] = {}
        newest = block_tables.newest_slots
        for group, _ in self._scopes:
            if group not in layouts:
                table_np = block_tables.tables_np[group]
                earlier_np = None if earlier is None else earlier.of(group)
                placed = self.block_size, self._pace, group, earlier_np, runs, newest
                layouts[group] = step_layout(rows, table_np, *placed)
        if earlier is not None:
            for group, layout in layouts.items():
                earlier.add(group, layout.slot_mapping_np)
        return [scope.plan_of(layouts[group]) for group, scope in self._scopes]

    @contextmanager
    def during(self, positions: mx.array, plans: Sequence[object]) -> Iterator[list[Any]]:
        """Yields the layers' caches for a forward, which must be built within the context.

        `positions` are [T] int32.
        """
        with ExitStack() as stack:
            if self._rotates:
                stack.enter_context(rotations.noted())
            for (_, scope), plan in zip(self._scopes, plans, strict=True):
                stack.enter_context(scope.during(positions, plan))
            yield self._caches

    @contextmanager
    def step(self, rows: Rows, block_tables: BlockTables) -> Iterator[list[Any]]:
        """Begins a step and yields the layers' caches; see `during`."""
        self.begin_step()
        with self.during(rows.positions, self.plans(rows, block_tables)) as caches:
            yield caches

    def block_pages(self) -> BlockPages:
        """Returns the interface to export and import blocks, for all networks of these layers."""
        groups: list[list[str]] = [[] for _ in range(max(self._group_of.values()) + 1)]
        for name, group in self._group_of.items():
            groups[group].append(name)
        return BlockPages(self._by_name, groups)

    def pool_arrays(self) -> list[mx.array]:
        return [array for storage in self.storages for array in storage.arrays]
