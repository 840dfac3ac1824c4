# SPDX-License-Identifier: Apache-2.0
"""Joins vLLM's process groups over gloo when an engine has several ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

#: Default timeout in seconds of a rank that waits in a group. Ranks load their weights within it
#: while others wait. Heartbeats detect the death of a rank much sooner.
TIMEOUT_S = 600


def is_distributed(parallel: ParallelConfig) -> bool:
    """Returns whether several ranks share a model."""
    return parallel.world_size > 1


def set_timeouts(parallel: ParallelConfig) -> None:
    """Sets vLLM's group timeouts to TIMEOUT_S unless they are set."""
    # torch's own default for gloo is half an hour.
    if parallel.distributed_timeout_seconds is None:
        parallel.distributed_timeout_seconds = TIMEOUT_S
    if parallel.cpu_distributed_timeout_seconds is None:
        parallel.cpu_distributed_timeout_seconds = parallel.distributed_timeout_seconds


def join(parallel: ParallelConfig, rank: int, local_rank: int, init_method: str) -> None:
    """Joins the world, tensor and pipeline parallel groups; no-op for a single rank.

    Raises RuntimeError: other ranks did not join in time.
    """
    # vLLM's groups read their timeouts from its current configuration. `init_method` is the
    # executor's address for ranks of one machine; those of several meet at --master-addr.
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
    """Returns every rank's `mine`, by rank; waits until all ranks have called it.

    Raises RuntimeError: other ranks did not call it in time.
    """
    import torch
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    gathered: list[object] = [None] * world.world_size
    torch.distributed.all_gather_object(gathered, mine, group=world.cpu_group)
    return gathered
