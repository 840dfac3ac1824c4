# SPDX-License-Identifier: Apache-2.0
"""Compiles forwards, so that MLX rebuilds their graphs without calling the model's Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from vllm.logger import init_logger

from metal_kernels.plan_arrays import all_else, with_arrays
from vllm_metal.engine.kv_cache.layer_state import LayerState, Pending, Traceable
from vllm_metal.patches.mlx_patches.traced_layers import TransposedWeights, angles_shared

logger = init_logger(__name__)

#: Largest compiled forward, in tokens: decode steps and those that verify drafts. Prefill spends
#: its time on the device, and hardly ever repeats a shape.
MAX_ROWS = 512
#: Graphs kept, least recently used evicted first. An engine decodes with a few at a time: shapes
#: change when requests come, go, or outgrow a width of the block table.
_MAX_GRAPHS = 64


@dataclass
class Graphs:
    """Says whether an engine's forwards may be compiled, and counts the compiled ones."""

    allowed: bool = True
    num_built: int = 0  # forwards built from compiled graphs so far


@dataclass
class _Graph:
    """A compiled forward, and the outputs that it leaves in storages."""

    compute: Callable[[list[mx.array]], list[mx.array]] | None = None  # None: shape seen only once
    num_results: int = 0
    #: Per storage and output: index of the scope with its plan, and number of its arrays. Recorded
    #: while tracing.
    left: list[list[tuple[int, int]]] = field(default_factory=list)


class CompiledForward:
    """Builds a network's forwards, from compiled graphs for shapes that recur."""

    # mlx-lm's models build a graph for each step with a Python call per operation. MLX can trace
    # one such call, and then rebuild the graph for other arrays by itself, with elementwise
    # operations fused. Everything else that a graph depends on is part of its key.

    def __init__(
        self,
        build: Callable[[Any, Sequence[object]], list[mx.array]],
        module: nn.Module,
        states: Sequence[LayerState],
        graphs: Graphs,
        variables: Callable[[Any], object] = lambda inputs: None,
    ) -> None:
        """
        Args:
            build: the network's Python: maps inputs and plans to arrays. It may run several passes,
                each with its own plans.
            module: the network, with its weights.
            states: the storage that the forward reads and writes.
            graphs: says whether forwards may be compiled, and counts the compiled ones.
            variables: maps inputs to lists and dictionaries of arrays that the forward reads and
                that may change between steps; the same ones for inputs that differ only in arrays.
        """
        self._build = build
        self._states = [state for state in states if isinstance(state, Traceable)]
        self._engine_graphs = graphs
        self._variables = variables
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        every = len(self._states) == len(states)
        self._traceable = graphs.allowed and every and all(s.traceable for s in self._states)
        self._weights = TransposedWeights(module)

    def __call__(self, inputs: object, plans: Sequence[object], num_rows: int) -> list[mx.array]:
        """Returns the forward's lazy results; call it after `begin_step`, with the scopes' plans.

        `inputs` are arrays in dataclasses and tuples.
        """
        results = self._by_graph(inputs, plans, num_rows) if self._traceable else None
        return self._build(inputs, plans) if results is None else results

    def _by_graph(
        self, inputs: object, plans: Sequence[object], num_rows: int
    ) -> list[mx.array] | None:
        # None without a graph for these shapes. A shape is traced when it comes the second time:
        # most prompts' shapes never recur. This also keeps tables that a model caches in its first
        # call out of the graph.

        # Command buffers that end amid a forward cannot be traced.
        if num_rows > MAX_ROWS or any(getattr(plan, "pace", None) for plan in plans):
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
            traced = self._traced(graph, inputs, plans, num_inputs)
            graph.compute = mx.compile(traced, inputs=self._variables(inputs))
            try:
                outputs = graph.compute(arrays)
            except (RuntimeError, ValueError) as error:  # the model reads an array's value
                logger.info(
                    "MLX cannot compile the model, so Python builds the graph of each step: %s",
                    error,
                )
                self._traceable = False
                self._graphs.clear()
                return None
        else:
            outputs = graph.compute(arrays)
        self._engine_graphs.num_built += 1
        self._accept(graph, plans, outputs)
        return outputs[: graph.num_results]

    def _graph(self, key: Hashable) -> _Graph | None:
        # None for new shapes, which are remembered.
        graph = self._graphs.pop(key, None)
        self._graphs[key] = graph or _Graph()
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _traced(
        self, graph: _Graph, inputs: object, plans: Sequence[object], num_inputs: Sequence[int]
    ) -> Callable[[list[mx.array]], list[mx.array]]:
        # The forward as a function of arrays only; it fills in the graph's `num_results` and
        # `left`. Everything else in `inputs` and `plans` becomes a constant of the graph.

        def forward(arrays: list[mx.array]) -> list[mx.array]:
            given = iter(arrays)
            traced_inputs = with_arrays(inputs, given)
            traced = [with_arrays(plan, given) for plan in plans]
            with ExitStack() as stack:
                stack.enter_context(self._weights.used())
                stack.enter_context(angles_shared())
                for state, count in zip(self._states, num_inputs, strict=True):
                    stack.enter_context(state.traced([next(given) for _ in range(count)]))
                outputs = list(self._build(traced_inputs, traced))
                graph.num_results = len(outputs)
                graph.left = []
                for state in self._states:
                    left = state.outputs
                    graph.left.append(
                        [(_index_of(traced, each.plan), len(each.arrays)) for each in left]
                    )
                    outputs += [array for each in left for array in each.arrays]
            return outputs

        return forward

    def _accept(self, graph: _Graph, plans: Sequence[object], outputs: list[mx.array]) -> None:
        """Passes the graph's outputs after its results (pending writes, fences) to the states."""
        first = graph.num_results
        for state, left in zip(self._states, graph.left, strict=True):
            pending: list[Pending[Any]] = []
            for index, count in left:
                pending.append(Pending(plans[index], outputs[first : first + count]))
                first += count
            state.outputs = pending


def _index_of(plans: Sequence[object], plan: object) -> int:
    return next(index for index, each in enumerate(plans) if each is plan)
