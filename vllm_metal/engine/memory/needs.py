# SPDX-License-Identifier: Apache-2.0
"""Estimates a pool's bytes for given requests, using vLLM's own plan of groups and blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_planning import (
    _project_kv_cache_groups_to_worker,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Needs:
    """Bytes of a pool that holds requests of one length, as vLLM computes them."""

    block_bytes: int
    blocks: Callable[[int], int]  # maps one request's tokens to its blocks
    requests: int = 1
    groups: int = 1  # groups of layers, each with its own blocks

    def __call__(self, tokens: int) -> int:
        blocks = self.requests * self.blocks(tokens) + 1  # vLLM reserves one block (the null block)
        return blocks * self.block_bytes

    @staticmethod
    def of(
        config: VllmConfig,
        specs: Mapping[str, KVCacheSpec],
        elsewhere: Collection[str] = (),
    ) -> Needs:
        """Computes one request's needs over layers with these specs.

        `elsewhere` names layers that other ranks compute: vLLM forms its groups over all layers,
        and a request has blocks of each group on every rank.
        """
        retained = max(0, config.num_prefill_lookahead_tokens - 1)
        specs = {
            name: replace(spec, extra_retained_tokens=retained)
            if isinstance(spec, SlidingWindowSpec)
            else spec
            for name, spec in specs.items()
        }
        groups = get_kv_cache_groups(config, dict(specs))
        if elsewhere:
            own = {name: spec for name, spec in specs.items() if name not in elsewhere}
            groups = _project_kv_cache_groups_to_worker(groups, own)
        placed = get_kv_cache_config_from_groups(config, groups, 2**50)

        def blocks(tokens: int) -> int:
            model, before = config.model_config, config.model_config.max_model_len
            # vLLM computes the concurrency for max_model_len only.
            model.max_model_len = tokens
            try:
                at_once = get_max_concurrency_for_kv_cache_config(config, placed)
            finally:
                model.max_model_len = before
            return round(placed.num_blocks / at_once)

        block_bytes = placed.kv_cache_tensors[0].size // placed.num_blocks
        return Needs(block_bytes, blocks, groups=len(groups))
