# SPDX-License-Identifier: Apache-2.0
"""Finds which ranks share a machine, and the address of the first one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_metal.engine.distributed import groups

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


@dataclass(frozen=True)
class Machine:
    """Address of rank 0's machine, and the ranks that run on this rank's machine."""

    host_of_first: str  # address of rank 0's machine
    pids: dict[int, int]  # processes on this machine by rank, including its own


def find(parallel: ParallelConfig, rank: int, init_method: str) -> Machine:
    """Finds this rank's machine; all ranks must call it once, after joining their process group.

    Raises RuntimeError: other ranks did not call it in time.
    """
    gathered = groups.share((_machine(parallel, rank), os.getpid()))
    ranks = dict(enumerate(each for each in gathered if isinstance(each, tuple)))
    here = {other: pid for other, (machine, pid) in ranks.items() if machine == ranks[rank][0]}
    return Machine(_host_of_first(parallel, init_method), here)


def _machine(parallel: ParallelConfig, rank: int) -> str:
    if not parallel.use_ray:
        return str(rank // parallel.local_world_size)
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _host_of_first(parallel: ParallelConfig, init_method: str) -> str:
    if parallel.use_ray:  # ranks meet at a port on rank 0's machine
        return urlsplit(init_method).hostname or ""
    return parallel.master_addr if parallel.nnodes > 1 else "127.0.0.1"
