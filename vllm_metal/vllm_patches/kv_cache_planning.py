# SPDX-License-Identifier: Apache-2.0
"""vLLM's functions that plan a KV cache, from where a release has them; changes nothing."""

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

try:
    from vllm.v1.core.kv_cache_planning import (  # type: ignore[import-not-found]
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
except ModuleNotFoundError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")

__all__ = [
    "get_kv_cache_config_from_groups",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
]
