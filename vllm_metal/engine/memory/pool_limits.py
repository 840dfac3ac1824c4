# SPDX-License-Identifier: Apache-2.0
"""Limits a KV pool whose size the user did not set; collects the settings a budget needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_metal.engine.memory import budget
from vllm_metal.engine.memory.budget import AskedPool, Most, Settings
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.profile import num_drafts
from vllm_metal.settings.envs import Device

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig

#: The CPU device shares memory with everything else on the machine and is meant for trying things
#: out, so the pool is limited to this unless --kv-cache-memory-bytes is set.
CPU_POOL_LIMIT = 4 * budget.GIB
#: The largest default pool on Metal: a share of the working set, limited to this many bytes unless
#: one request of --max-model-len takes more or --gpu-memory-utilization is set. If the length is
#: fitted, the share still holds, but a request may exceed the limit in bytes. The whole pool is
#: touched at start, and after a pause macOS takes some 19 ms per GB to page it in again
#: (llama.cpp#10119): 0.6 s for 32. So larger pools are opt-in: 12 GiB, the share of a 64 GB Mac,
#: hold 85,000 tokens of an 8B model.
METAL_POOL_SHARE = 1 / 4
METAL_POOL_LIMIT = 32 * budget.GIB
#: On Macs with up to 16 GB, a quarter may be too little for a conversation with documents: there a
#: fitted context of this length may take up to half. A 24 GB Mac has a working set of 16.
SMALL_TOTAL = 14 * budget.GIB
SMALL_CONTEXT = 16_384
SMALL_POOL_SHARE = 1 / 2


def settings_of(config: VllmConfig, kind: Device, needs: Needs, total: int) -> Settings:
    """Collects vLLM's settings; `total` is the device's usable bytes."""
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    asked = None
    if cache.num_gpu_blocks_override is not None:
        asked = AskedPool(
            "--num-gpu-blocks-override", cache.num_gpu_blocks_override, needs.block_bytes
        )
    elif cache.kv_cache_memory_bytes is not None:
        asked = AskedPool("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, 1)
    settings = Settings(
        utilization=cache.gpu_memory_utilization,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=model.max_model_len,
        fitted=model.original_max_model_len == -1,
        asked=asked,
        num_drafts=num_drafts(config),
        # A step writes one block of each group for every request, which no other request shares.
        request_bytes=needs.groups * needs.block_bytes,
    )
    return replace(settings, most=_default_limit(cache, kind, settings, needs, total))


def _default_limit(
    cache: CacheConfig, kind: Device, settings: Settings, needs: Needs, total: int
) -> Most | None:
    if kind == "cpu":
        return Most(CPU_POOL_LIMIT, "on a CPU")
    if cache.gpu_memory_utilization != type(cache).gpu_memory_utilization:
        return None  # set by the user: not vLLM's default
    share, longest = int(total * METAL_POOL_SHARE), needs(settings.max_model_len)
    fitted = min(share, max(METAL_POOL_LIMIT, longest))
    if total <= SMALL_TOTAL:
        useful = needs(min(SMALL_CONTEXT, settings.max_model_len))
        fitted = max(fitted, min(useful, int(total * SMALL_POOL_SHARE)))
    return Most(
        max(min(share, METAL_POOL_LIMIT), longest),
        "unless --gpu-memory-utilization is set",
        max(fitted, needs(settings.least_context)),
    )
