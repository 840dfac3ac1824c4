# SPDX-License-Identifier: Apache-2.0
"""The machine that a model must fit on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_metal.device import mlx_device
from vllm_metal.device.mlx_device import MemoryUsage
from vllm_metal.engine.memory.planner import SOURCES, cache_limit
from vllm_metal.engine.memory.share import Share
from vllm_metal.settings import envs

GIB = 2**30
#: Metal's recommended working set as a share of the memory. Users of llama.cpp logged 10922.67 MiB
#: of 16 GB, 21845.34 of 32 (ggml-org/llama.cpp #2011, ollama/ollama #434) and 73728 of 96
#: (ggml-org/llama.cpp #3213). macOS 26 offers more, 107.52 GiB of 128 (antirez/ds4 #893). The size
#: alone does not tell which applies, so we use the smaller share.
_SHARE_OF_SMALL, _SHARE_OF_LARGE = 2 / 3, 3 / 4
_LARGEST_SMALL = 32 * GIB


@dataclass(frozen=True)
class Machine:
    """A device and its memory, in bytes."""

    name: str
    kind: envs.Device
    source: str  # source of `total`, for messages
    total: int  # maximum for the device
    in_use: int  # memory used by other programs

    @property
    def cache(self) -> int:
        """Bytes of buffers that MLX may keep for reuse."""
        return cache_limit(self.kind, self.total)

    def part(self, workers: int) -> Machine:
        """Returns the share of each of `workers` processes of a server (engine.memory.share)."""
        if workers == 1:
            return self
        share = Share(workers, self.in_use)
        whole = MemoryUsage(total=self.total, available=self.total - self.in_use, active=0)
        part = share.part(whole)
        return replace(
            self,
            source=self.source + share.words,
            total=part.total,
            in_use=part.total - part.available,
        )

    @staticmethod
    def mac(memory: int) -> Machine:
        """Returns a Mac with `memory` bytes on which no other large program runs."""
        share = _SHARE_OF_SMALL if memory <= _LARGEST_SMALL else _SHARE_OF_LARGE
        name = f"a Mac of {memory / GIB:g} GB"
        return Machine(name, "metal", f"{SOURCES['metal']} for {name}", int(memory * share), 0)

    @staticmethod
    def this() -> Machine:
        """Returns this machine with the memory that is free now.

        Raises ValueError if it is no Mac and VLLM_METAL_DEVICE=cpu is not set.
        """
        kind = envs.requested_device()
        if kind is None:
            raise ValueError(
                "this machine has no Metal device: give the memory of a Mac, such as --memory 24GB"
            )
        mlx_device.select(kind)
        usage = mlx_device.memory(kind)
        in_use = max(usage.total - usage.available - usage.active, 0)
        name = "this machine's CPU" if kind == "cpu" else f"this Mac, {mlx_device.name(kind)}"
        return Machine(name, kind, SOURCES[kind], usage.total, in_use)
