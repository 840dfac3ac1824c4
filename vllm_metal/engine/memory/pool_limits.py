# SPDX-License-Identifier: Apache-2.0
"""Caps a KV pool whose size nobody asked for, and reads what else of vLLM's settings counts."""

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

#: The CPU device shares memory with everything else on the machine and is for trying things out,
#: so it takes this much and no more unless --kv-cache-memory-bytes says otherwise.
CPU_POOL_LIMIT = 4 * budget.GIB
#: The largest pool on Metal: a share of the working set, and so many bytes, unless one request of
#: --max-model-len takes more, or --gpu-memory-utilization is set. Where the length is what fits,
#: the share stands, and a request may take more than so many bytes. All of a pool is touched at
#: start, and after a pause macOS takes some 19 ms a GB to have it in place again (llama.cpp#10119):
#: 0.6 s for 32. So a larger one is for whoever wants it: 12 GiB, the share of a Mac of 64 GB, are
#: 85,000 tokens of an 8B model.
METAL_POOL_SHARE = 1 / 4
METAL_POOL_LIMIT = 32 * budget.GIB
#: On Macs of up to 16 GB a quarter may be less than a conversation with documents needs: there up
#: to a half goes to a fitted context of so many tokens. Of 24 GB, Metal recommends 16.
SMALL_TOTAL = 14 * budget.GIB
SMALL_CONTEXT = 16_384
SMALL_POOL_SHARE = 1 / 2


def settings_of(config: VllmConfig, kind: Device, needs: Needs, total: int) -> Settings:
    """What of vLLM's settings the sum depends on.

    Args:
        config: vLLM's.
        kind: of the device.
        needs: of a pool for the model.
        total: bytes that the device may use at all.
    """
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
        # A block of each group is written in a step, and nobody else's.
        request_bytes=needs.groups * needs.block_bytes,
    )
    return replace(settings, most=_most(cache, kind, settings, needs, total))


def _most(
    cache: CacheConfig, kind: Device, settings: Settings, needs: Needs, total: int
) -> Most | None:
    """The largest pool that is made unasked."""
    if kind == "cpu":
        return Most(CPU_POOL_LIMIT, "on a CPU")
    if cache.gpu_memory_utilization != type(cache).gpu_memory_utilization:
        return None
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
