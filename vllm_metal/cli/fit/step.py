# SPDX-License-Identifier: Apache-2.0
"""Computes the peak memory of an engine's largest forward pass, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.cli.fit.graph import record_with_weights, recordable
from vllm_metal.cli.fit.peak import peak
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import Traceable
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.memory.profile import LargestStep, Peaks, drafted
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.settings import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def step_peak(
    parts: ModelParts,
    layers: Sequence[StatefulLayer],
    config: VllmConfig,
    backend: KVBackend,
    kind: envs.Device,
) -> tuple[Peaks, int]:
    """Predicts the peaks, without weights, that the functions of `memory.profile` would measure.

    Args:
        parts: parts of a model whose parameters may be lazy, and stay so.
        layers, config, backend: see `profile_step`.
        kind: the engine's device.

    Returns:
        The peaks, and the size of the vocabulary (of hidden states if the engine pools).

    Raises:
        ValueError: the model uses an operation that MLX cannot export.
    """
    # As on Metal, where MLX waits for each operation. Not included: rounding to whole pages by
    # Metal, small temporary buffers of some operations, and that command buffers hold their inputs
    # until they end.
    with recordable(metal=kind == "metal"):
        # Without a command-buffer limit, because the graph is recorded as a whole.
        prompts = LargestStep.of(layers, config, backend, paced=False)
        forward, vocab_size = _recorded_peak(parts, prompts)
        peaks = Peaks(forward)
        if any(layer.state_bytes for layer in layers):
            _, most = drafted(config)
            requests, drafts = (
                _two_steps_peak(parts, LargestStep.of(layers, config, backend, count, paced=False))
                for count in (0, most)
            )
            peaks = Peaks(forward, requests, drafts)
    return peaks, vocab_size


def _two_steps_peak(parts: ModelParts, step: LargestStep) -> int:
    # The peak of a step and the next one beside the pool, which exists already.
    pool = sum(array.nbytes for array in step.layers.pool_arrays())
    return _recorded_peak(parts, step, twice=True)[0] - pool


def _recorded_peak(parts: ModelParts, step: LargestStep, twice: bool = False) -> tuple[int, int]:
    """Returns the peak bytes of a step and its pool, and the size of the vocabulary.

    `twice`: also record the next step.
    """

    def build(*pool: mx.array) -> list[mx.array]:
        given = iter(pool)
        for storage in step.layers.storages:
            storage.arrays = [next(given) for _ in storage.arrays]
        outputs = _forward(parts, step, [])
        if not twice:
            return outputs
        # Or what follows from weights alone, as routers' in float32, would be kept in between.
        weights = dict(tree_flatten(parts.model.parameters()))
        again = mx.depends([*weights.values()], outputs[:1])
        parts.model.update(tree_unflatten([*zip(weights, again, strict=True)]))
        return _forward(parts, step.next(), outputs[:1])

    graph, weights = record_with_weights(parts.model, build, step.layers.pool_arrays())
    results, *kept = graph.outputs
    shape, _ = graph.arrays[results]
    return peak(graph, [results], kept, weights), shape[-1]


def _forward(parts: ModelParts, step: LargestStep, before: Sequence[mx.array]) -> list[mx.array]:
    """Builds the graph of a forward that runs after `before`.

    Returns its results, and all arrays that layers keep, read again, or pass to the next step.
    """
    with step.caches() as caches:
        (input_ids,) = mx.depends([mx.zeros(step.rows.input_ids.shape, mx.int32)], before)
        hidden_states = parts.forward_hidden(replace(step.rows.inputs, input_ids=input_ids), caches)
    results = step.results(parts, hidden_states)
    states = [state for state in step.layers.layer_states if isinstance(state, Traceable)]
    left = [array for state in states for each in state.outputs for array in each.arrays]
    read = [array for state in states for array in state.inputs]
    return [results, *step.layers.pool_arrays(), *read, *left]
