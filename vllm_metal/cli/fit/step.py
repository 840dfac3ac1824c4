# SPDX-License-Identifier: Apache-2.0
"""The most memory that an engine's largest forward pass takes, without a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

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
    """What `memory.profile.profile_step` and `requests_profile` take beside the weights, where MLX
    waits for each operation, as it does on Metal.

    Not covered: what Metal rounds up to whole pages, the little that some of its operations set
    aside while they run, and that its command buffers hold what they read until they end.

    Args:
        parts: of a model whose parameters may be lazy; they stay so.
        layers, config, backend: as for `profile_step`.
        kind: of the device that the engine runs on.

    Returns:
        The peaks, and the size of the vocabulary, or of hidden states where the engine pools.

    Raises:
        ValueError: the model uses an operation of which MLX does not tell what it is.
    """
    with recordable(metal=kind == "metal"):
        # Without a pace: the graph is recorded as a whole.
        prompts = LargestStep.of(layers, config, backend, paced=False)
        forward, vocab_size = _recorded(parts, prompts)
        peaks = Peaks(forward)
        if any(layer.state_bytes for layer in layers):
            _, most = drafted(config)
            requests, drafts = (
                _of_two(parts, LargestStep.of(layers, config, backend, count, paced=False))
                for count in (0, most)
            )
            peaks = Peaks(forward, requests, drafts)
    return peaks, vocab_size


def _of_two(parts: ModelParts, step: LargestStep) -> int:
    """Bytes that a step and the next one take at most beside their pool, which is there."""
    pool = sum(array.nbytes for array in step.layers.pool_arrays())
    return _recorded(parts, step, twice=True)[0] - pool


def _recorded(parts: ModelParts, step: LargestStep, twice: bool = False) -> tuple[int, int]:
    """Bytes that a step and its pool take at most, and the size of the vocabulary.

    Args:
        parts: of the model; its parameters stay as they are.
        step: to be recorded.
        twice: whether the next step is recorded behind it.
    """

    def build(*pool: mx.array) -> list[mx.array]:
        given = iter(pool)
        for storage in step.layers.storages:
            storage.arrays = [next(given) for _ in storage.arrays]
        outputs = _forward(parts, step, [])
        return _forward(parts, step.next(), outputs[:1]) if twice else outputs

    graph, weights = record_with_weights(parts.model, build, step.layers.pool_arrays())
    results, *kept = graph.outputs
    shape, _ = graph.arrays[results]
    return peak(graph, [results], kept, weights), shape[-1]


def _forward(parts: ModelParts, step: LargestStep, before: Sequence[mx.array]) -> list[mx.array]:
    """Builds a forward that runs once `before` is there.

    Returns:
        Its results, and all that the layers keep besides, read again, or leave for the next step.
    """
    with step.caches() as caches:
        (input_ids,) = mx.depends([mx.zeros(step.rows.input_ids.shape, mx.int32)], before)
        hidden_states = parts.forward_hidden(replace(step.rows.inputs, input_ids=input_ids), caches)
    results = step.results(parts, hidden_states)
    states = [state for state in step.layers.layer_states if isinstance(state, Traceable)]
    left = [array for state in states for each in state.outputs for array in each.arrays]
    read = [array for state in states for array in state.inputs]
    return [results, *step.layers.pool_arrays(), *read, *left]
