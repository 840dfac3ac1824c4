# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of a tensor-parallel group in an MLX ring, over which layers all-reduce."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import torch.distributed
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

#: Backend of mx.distributed: TCP between neighbors, on any interface.
BACKEND = "ring"


def join_ring(parallel: ParallelConfig) -> mx.distributed.Group | None:
    """Creates the ring of this rank's tensor group, all of whose ranks must call it together.

    Returns None for a single rank.

    Raises RuntimeError: MLX has no ring backend, or a neighbor cannot be reached.
    """
    # Each pipeline stage has its own ring, and a process can have only one: MLX keeps the first.
    if parallel.tensor_parallel_size == 1:
        return None
    if not mx.distributed.is_available(BACKEND):
        raise RuntimeError(
            "--tensor-parallel-size needs MLX's ring backend, which this build of MLX lacks: "
            "install MLX's own wheel"
        )
    from vllm.distributed.parallel_state import get_tp_group

    tensor = get_tp_group()
    size, rank = tensor.world_size, tensor.rank_in_group
    with _reserve_port(_own_address(parallel)) as own:
        addresses: list[Any] = [None] * size
        # vLLM's tensor group exists already, so ranks agree on addresses through it.
        torch.distributed.all_gather_object(addresses, own, group=tensor.cpu_group)
        with _mlx_environment(addresses, rank):
            group = mx.distributed.init(strict=True, backend=BACKEND)
    if (group.size(), group.rank()) != (size, rank):
        raise RuntimeError(
            f"MLX made a ring of {group.size()} with this rank at {group.rank()} instead "
            f"of {rank} of {size}: this process had already initialized mx.distributed"
        )
    logger.info("Rank %d of a ring of %d, at %s", rank, size, own)
    return group


def _own_address(parallel: ParallelConfig) -> str:
    """Returns this rank's address for its neighbors: VLLM_HOST_IP, or vLLM's guess.

    Raises ValueError: the address is IPv6, which MLX's ring does not support.
    """
    if parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray":
        return "127.0.0.1"
    from vllm.utils.network_utils import get_ip

    address = get_ip()
    if ":" in address:
        raise ValueError(
            f"MLX's ring needs IPv4: set VLLM_HOST_IP to an IPv4 address instead of {address}"
        )
    return address


@contextmanager
def _reserve_port(address: str) -> Iterator[str]:
    """Yields "address:port" of a free port, held until MLX listens on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as MLX does, to share the port
        held.bind((address, 0))
        yield f"{address}:{held.getsockname()[1]}"


@contextmanager
def _mlx_environment(addresses: list[str], rank: int) -> Iterator[None]:
    """Passes the ring's addresses to MLX: a file named by environment variables."""
    with tempfile.TemporaryDirectory(prefix="vllm-metal-ring-") as folder:  # 0700
        hostfile = Path(folder) / "hosts.json"
        hostfile.write_text(json.dumps([[address] for address in addresses]))
        variables = {"MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
