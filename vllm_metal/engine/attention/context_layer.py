# SPDX-License-Identifier: Apache-2.0
"""Layer of a draft network whose K/V are written, but not read, by the target model's forward."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import LayerState, StepScope


class ContextKind(NamedTuple):
    """Layer properties that a plan of writes depends on."""

    num_kv_heads: int


@dataclass(frozen=True)
class ContextLayer(AttentionLayer):
    """The KV cache of a draft layer, written by the target's steps."""

    @staticmethod
    def of(layer: AttentionLayer) -> ContextLayer:
        """Wraps a draft model's layer; keeps its name and storage."""
        given = {each.name: getattr(layer, each.name) for each in fields(AttentionLayer)}
        if layer.rotation is not None:
            given["rotation"] = layer.rotation._replace(queries=False)
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
