# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's pool planner for one worker."""

from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs


def planned(config, specs, memory):
    """Returns the pool's tensors and groups for layers of these specs, in `memory` bytes."""
    groups = get_global_kv_cache_groups(config, [dict(specs)])
    (found,) = get_kv_cache_configs(config, [dict(specs)], [memory], groups)
    return found
