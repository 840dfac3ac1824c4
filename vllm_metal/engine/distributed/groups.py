# SPDX-License-Identifier: Apache-2.0
"""Joins vLLM's process groups over gloo, in a worker that has other ranks beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

#: Seconds after which a rank that waits in a group gives up where vLLM's options name no other
#: time. One loads its weights within it while another waits; the death of a rank is heard of much
#: sooner, by heartbeats.
TIMEOUT_S = 600


def is_distributed(parallel: ParallelConfig) -> bool:
    """Whether the ranks of one engine share a model."""
    return parallel.world_size > 1


def set_timeouts(parallel: ParallelConfig) -> None:
    """Has ranks wait for each other no longer than TIMEOUT_S where the user has not said how long.

    torch's own default for gloo is half an hour.
    """
    if parallel.distributed_timeout_seconds is None:
        parallel.distributed_timeout_seconds = TIMEOUT_S
    if parallel.cpu_distributed_timeout_seconds is None:
        parallel.cpu_distributed_timeout_seconds = parallel.distributed_timeout_seconds


def join(parallel: ParallelConfig, rank: int, local_rank: int, init_method: str) -> None:
    """Joins the world and its groups for tensor and pipeline parallel; nothing where a rank is all.

    vLLM's configuration must be the current one: its groups read their timeouts from there.

    Args:
        parallel: of the engine.
        rank: of this worker among the engine's.
        local_rank: of this worker on its machine.
        init_method: where ranks of one machine meet, as the executor says; those of several meet at
            the --master-addr.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    if not is_distributed(parallel):
        return
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        set_custom_all_reduce,
    )

    set_timeouts(parallel)
    set_custom_all_reduce(False)
    seconds = parallel.distributed_timeout_seconds
    assert seconds is not None
    init_distributed_environment(
        parallel.world_size, rank, init_method, local_rank, "gloo", timedelta(seconds=seconds)
    )
    ensure_model_parallel_initialized(
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    )


def share(mine: object) -> list[object]:
    """What each rank of the engine gave, by rank; all of them call it, and wait for each other.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    import torch
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    everyone: list[object] = [None] * world.world_size
    torch.distributed.all_gather_object(everyone, mine, group=world.cpu_group)
    return everyone
