# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's engine use the recurrent-state mode of its workers, even in other processes."""

# Remove when the scheduler reads mamba_cache_mode from the workers' specs. Read against vLLM
# 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from vllm_metal.patches.vllm_patches.replacing import replace

Specs = list[dict[str, KVCacheSpec]]


def take_modes_of_workers() -> None:
    """Makes an engine's scheduler end chunks where workers store states; call it in the engine."""
    # vLLM chooses the mode by architecture and prefix caching. Its block manager reads it from the
    # workers' specs, but its scheduler from the engine's configuration, and workers in other
    # processes only have copies of that.
    replace(Executor, "get_kv_cache_specs", _with_their_mode)


def _with_their_mode(get_specs: Callable[[Any], Specs], self: Any) -> Specs:
    specs = get_specs(self)
    for spec in (each for of_worker in specs for each in of_worker.values()):
        if isinstance(spec, MambaSpec):
            self.vllm_config.cache_config.mamba_cache_mode = spec.mamba_cache_mode
    return specs
