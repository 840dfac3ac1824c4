# SPDX-License-Identifier: Apache-2.0
"""Which ranks of an engine are on one machine, and by which address others reach the first."""

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
    """What a rank knows of where the others are.

    host_of_first: address of rank 0's machine. pids: processes of the ranks of this machine, its
    own among them, by rank.
    """

    host_of_first: str
    pids: dict[int, int]


def find(parallel: ParallelConfig, rank: int, init_method: str) -> Machine:
    """What this rank knows of its machine; every rank calls it once, and they wait for each other.

    Args:
        parallel: of the engine.
        rank: of this process.
        init_method: where the ranks met, as the executor says.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    everyone = groups.share((_machine(parallel, rank), os.getpid()))
    places = dict(enumerate(each for each in everyone if isinstance(each, tuple)))
    here = {other: pid for other, (machine, pid) in places.items() if machine == places[rank][0]}
    return Machine(_host_of_first(parallel, init_method), here)


def _machine(parallel: ParallelConfig, rank: int) -> str:
    if not parallel.use_ray:
        return str(rank // parallel.local_world_size)
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _host_of_first(parallel: ParallelConfig, init_method: str) -> str:
    if parallel.use_ray:  # ranks meet at a port of the first one's
        return urlsplit(init_method).hostname or ""
    return parallel.master_addr if parallel.nnodes > 1 else "127.0.0.1"
