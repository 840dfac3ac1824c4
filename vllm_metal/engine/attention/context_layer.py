# SPDX-License-Identifier: Apache-2.0
"""A layer of a draft network whose K/V the target's forward writes and never attends to."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import LayerState, StepScope


class ContextKind(NamedTuple):
    """What a plan of writes depends on, beside the step."""

    num_kv_heads: int


@dataclass(frozen=True)
class ContextLayer(AttentionLayer):
    """A draft layer's share of the KV cache, as the target's step writes it."""

    @staticmethod
    def of(layer: AttentionLayer) -> ContextLayer:
        """The layer's, under its name and in its storage."""
        given = {each.name: getattr(layer, each.name) for each in fields(AttentionLayer)}
        return ContextLayer(**given)

    @cached_property
    def kind(self) -> Hashable:
        return ContextKind(self.num_kv_heads)

    def scope(self, state: LayerState) -> StepScope:
        assert isinstance(state, LayerKVCache)
        backend, split = state.backend, state.split
        return StepScope(
            lambda layout: backend.plan_of_writes(layout.split(split), self.num_kv_heads)
        )
