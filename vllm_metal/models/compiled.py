# SPDX-License-Identifier: Apache-2.0
"""Forwards whose graph MLX builds again by itself, without a call of the model's Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from vllm.logger import init_logger

from metal_kernels.plan_arrays import all_else, with_arrays
from vllm_metal.attention.forward_inputs import ForwardInputs
from vllm_metal.kv_cache.layer_state import LayerState, Pending, StepScope, Traceable
from vllm_metal.mlx_patches.traced_layers import TransposedWeights, angles_shared
from vllm_metal.models.parts import ModelParts

logger = init_logger(__name__)

#: The most rows: of decode steps and of those that verify drafts. Prefill spends its time on the
#: device, and hardly ever has the same shapes twice.
MAX_ROWS = 512
#: Graphs kept, the least recently used goes first. An engine decodes with a few at a time: shapes
#: change when requests come, go, or outgrow a width of the block table.
_MAX_GRAPHS = 64


@dataclass
class Graphs:
    """Whether an engine's forwards may be built by graphs, and how many were."""

    allowed: bool = True
    num_built: int = 0  # forwards, ever


@dataclass
class _Graph:
    """A compiled forward, and what it leaves."""

    compute: Callable[[list[mx.array]], list[mx.array]] | None = None  # None: seen once, not traced
    #: Of each storage, for each of its outputs: the scope whose plan it was made by, and its number
    #: of arrays. Noted when the graph is traced.
    left: list[list[tuple[int, int]]] = field(default_factory=list)


class CompiledForwards:
    """Builds the forwards of one network; those of shapes that come again as compiled graphs.

    mlx-lm's models build a graph anew for each step, by a call in Python for every operation. MLX
    can trace one such call, and then builds the same graph from other arrays by itself, with
    elementwise operations joined. What a graph depends on besides is part of its key.
    """

    def __init__(
        self,
        parts: ModelParts,
        caches: Sequence[Any],
        scopes: Sequence[StepScope],
        states: Sequence[LayerState],
        graphs: Graphs,
    ) -> None:
        """
        Args:
            parts: the network.
            caches: of its layers.
            scopes: of the caches.
            states: the storage that forwards read and write.
            graphs: whether to make any; forwards that they build are counted there.
        """
        self._parts = parts
        self._caches = list(caches)
        self._scopes = list(scopes)
        self._states = [state for state in states if isinstance(state, Traceable)]
        self._of_all = graphs
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        every = len(self._states) == len(states)
        self._traceable = graphs.allowed and every and all(s.traceable for s in self._states)
        self._weights = TransposedWeights(parts.model)

    def forward_hidden(self, inputs: ForwardInputs) -> mx.array:
        """[T, 1, H] hidden states of T rows; the step has begun."""
        hidden = self._by_graph(inputs) if self._traceable else None
        return self._parts.forward_hidden(inputs, self._caches) if hidden is None else hidden

    def _by_graph(self, inputs: ForwardInputs) -> mx.array | None:
        """Hidden states as a graph computes them; None where there is no graph of such steps.

        A shape that comes for the first time is not traced: most of a prompt's never come again.
        So tables that a model makes in its first call, and keeps, stay out of the graph.
        """
        plans = [scope.plan for scope in self._scopes]
        # Command buffers that end amid a forward cannot be traced.
        if inputs.input_ids.size > MAX_ROWS or any(getattr(plan, "pace", None) for plan in plans):
            return None
        arrays: list[mx.array] = []
        key = [all_else(each, arrays) for each in (inputs, *plans)]
        num_inputs = []
        for state in self._states:
            of_state = state.inputs
            num_inputs.append(len(of_state))
            arrays += of_state
        graph = self._graph((*key, *num_inputs))
        if graph is None:
            return None
        if graph.compute is None:
            self._weights.make()
            graph.compute = mx.compile(self._traced(graph, inputs, plans, num_inputs))
            try:
                hidden, *others = graph.compute(arrays)
            except (RuntimeError, ValueError) as error:  # the model wants to see a value
                logger.info("MLX cannot trace the model, whose Python builds each step: %s", error)
                self._traceable = False
                self._graphs.clear()
                return None
        else:
            hidden, *others = graph.compute(arrays)
        self._of_all.num_built += 1
        self._accept(graph, plans, iter(others))
        return hidden

    def _graph(self, key: Hashable) -> _Graph | None:
        """None: these shapes come for the first time."""
        graph = self._graphs.pop(key, None)
        self._graphs[key] = graph or _Graph()
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _traced(
        self,
        graph: _Graph,
        inputs: ForwardInputs,
        plans: Sequence[object],
        num_inputs: Sequence[int],
    ) -> Callable[[list[mx.array]], list[mx.array]]:
        """The forward as a function of arrays alone; it notes what storages it leaves outputs in.

        Args:
            graph: whose `left` is filled in.
            inputs: of the rows. Of these and of the plans, all but the arrays is taken as it is.
            plans: of the scopes.
            num_inputs: arrays of each storage.
        """

        def forward(arrays: list[mx.array]) -> list[mx.array]:
            given = iter(arrays)
            of_rows = with_arrays(inputs, given)
            positions = of_rows.positions[0]
            traced = [with_arrays(plan, given) for plan in plans]
            with ExitStack() as stack:
                stack.enter_context(self._weights.used())
                stack.enter_context(angles_shared())
                for scope, plan in zip(self._scopes, traced, strict=True):
                    stack.enter_context(scope.traced(positions, plan))
                for state, count in zip(self._states, num_inputs, strict=True):
                    stack.enter_context(state.traced([next(given) for _ in range(count)]))
                outputs = [self._parts.forward_hidden(of_rows, self._caches)]
                for observer in self._parts.observers:
                    outputs += observer.newest
                graph.left = []
                for state in self._states:
                    left = state.outputs
                    graph.left.append(
                        [(_place(traced, each.plan), len(each.arrays)) for each in left]
                    )
                    outputs += [array for each in left for array in each.arrays]
            return outputs

        return forward

    def _accept(self, graph: _Graph, plans: Sequence[object], outputs: Iterator[mx.array]) -> None:
        """Hands the graph's extra outputs (hidden, pending writes) to observers and states."""
        for observer in self._parts.observers:
            observer.newest = [next(outputs) for _ in range(observer.num_layers)]
        for state, left in zip(self._states, graph.left, strict=True):
            state.outputs = [
                Pending(plans[place], [next(outputs) for _ in range(count)])
                for place, count in left
            ]


def _place(plans: Sequence[object], plan: object) -> int:
    """Which of the plans it is."""
    return next(place for place, each in enumerate(plans) if each is plan)
