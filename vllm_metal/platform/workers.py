# SPDX-License-Identifier: Apache-2.0
"""Configures an engine's workers: ranks that each run a part of a model, data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.device import mlx_device
from vllm_metal.engine.distributed import groups, on_ray
from vllm_metal.engine.memory.share import Share
from vllm_metal.patches.vllm_patches import memory_shares, processes, replicas
from vllm_metal.settings import envs

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def prepare_ranks(vllm_config: VllmConfig, device: envs.Device) -> None:
    """Configures workers that each run a part of one model; no-op for a single worker."""
    from vllm_metal.patches.vllm_patches import engine_queues

    parallel = vllm_config.parallel_config
    if not groups.is_distributed(parallel):
        return
    groups.set_timeouts(parallel)
    processes.spawn()
    engine_queues.notice_queue_shutdown()
    if parallel.use_ray:  # Ray places ranks on machines later, so ranks share memory then
        on_ray.carry(parallel, envs.AT_IMPORT)
    else:
        _share_memory(parallel, parallel.local_world_size, device)
    # Ranks must prepare a step from the same state, so each needs all results of the last step.
    vllm_config.scheduler_config.async_scheduling = False


def prepare_replicas(vllm_config: VllmConfig, device: envs.Device) -> None:
    """Makes data-parallel ranks independent engines; no-op for a single rank."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:  # also in the process of one of several ranks
        return
    replicas.make_independent(vllm_config)
    replicas.mark_ranks(parallel)
    _share_memory(parallel, parallel.data_parallel_size_local, device)


def _share_memory(parallel: ParallelConfig, workers: int, device: envs.Device) -> None:
    # Before any worker starts, so that all get equal shares of the memory that is free now.
    if workers > 1 and memory_shares.given(parallel) is None:
        memory_shares.give(parallel, Share.of(workers, mlx_device.memory(device)))
