# SPDX-License-Identifier: Apache-2.0
"""Describes the largest calls of a step, and keeps what was measured of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.memory.budget import StepStates
from vllm_metal.memory.profile import drafted, most_sampled, profile_layers, profile_sampling
from vllm_metal.models.loader import mlx_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.kv_cache.stateful_layer import StatefulLayer


@dataclass(frozen=True)
class LargestCalls:
    """The largest attention and sampling calls of a step, run once to measure their memory."""

    attention: Callable[[int], None] | None  # over a context of so many tokens; None: nothing more
    sampling: Callable[[int], None]  # of so many rows
    vocab_size: int
    most_sampled: int  # rows of a step
    logit_bytes: int  # of one
    drafted: tuple[int, int] = (1, 0)  # see profile.drafted
    states: tuple[int, ...] = ()  # bytes of a request's, by layer that keeps one

    @staticmethod
    def of(
        config: VllmConfig,
        layers: Sequence[StatefulLayer],
        kv_cache_type: type[LayerKVCache],
        vocab_size: int,
    ) -> LargestCalls:
        """What an engine with these settings and layers is asked for."""
        gathers = any(layer.gathers(kv_cache_type) for layer in layers)
        return LargestCalls(
            partial(profile_layers, layers, config, kv_cache_type) if gathers else None,
            partial(profile_sampling, config, vocab_size),
            vocab_size,
            most_sampled(config),
            mlx_dtype(config).size,
            drafted(config),
            tuple(layer.state_bytes for layer in layers if layer.state_bytes),
        )

    def step_states(self, peaks: Peaks, num_tokens: int) -> StepStates | None:
        """What the states of steps take; None where no layer keeps any.

        A step is taken for the sum of its parts: rows of prompts, as many as it may have, and what
        each request and each draft takes beyond a row of them. Memory grows with the drafts of a
        request as a maximum of lines does, so that a line from none to all of them is above it.

        Args:
            peaks: that were measured.
            num_tokens: rows that `peaks.forward` is of.
        """
        if not self.states:
            return None
        requests, drafts = self.drafted
        # Of the step before, a layer's states are there until the layer begins.
        beside = max(self.states) - peaks.forward // num_tokens
        of_drafts = peaks.drafts - peaks.requests
        return StepStates(
            max(-(-peaks.requests // requests) + beside, 0),
            max(-(-of_drafts // (requests * drafts)) + beside, 0) if drafts else 0,
        )


@dataclass(frozen=True)
class Workload:
    """The largest things a device is asked for, run to be measured."""

    forward: Callable[[], None]
    calls: LargestCalls
    #: What runs the requests of `profile.drafted` with so many drafts, once their pool is there;
    #: None: no layer keeps states.
    requests: Callable[[int], Callable[[], None]] | None = None


@dataclass(frozen=True)
class Peaks:
    """What forward passes take at most; bytes."""

    forward: int  # of max_num_batched_tokens rows of prompts
    requests: int = 0  # of the requests of `profile.drafted`, without drafts
    drafts: int = 0  # of the same with all drafts that they may have
