# SPDX-License-Identifier: Apache-2.0
"""Check mode: runs kernels and checks every access to device and threadgroup memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from . import toolchain
from .kernel_call import Executor
from .launch import Buffer, Result, Schedule


@dataclass(frozen=True)
class Traffic:
    """One dispatch's accesses to one buffer. A line is 128 bytes, aligned to the buffer's start."""

    read_bytes: int  # as threads ask for them, summed over threads
    written_bytes: int
    # Lines that one load or store instruction of a simdgroup touches, summed over instructions. The
    # lanes' accesses are one instruction if they come from the same place in the code, for the same
    # time since the simdgroup last synchronized.
    lines_read: int
    lines_written: int
    # Different lines that a threadgroup reads, summed: the traffic if its cache loses nothing.
    unique_lines_read_by_threadgroup: int


@dataclass(frozen=True)
class Dispatch:
    """Counters of one kernel call."""

    kernel: str
    buffers: MappingProxyType[str, Traffic]  # by the buffer's name in the kernel
    threadgroups: int
    threadgroup_bytes: int  # of threadgroup memory, declared by each
    barriers_per_threadgroup: float
    simd_collectives: int  # simdgroup functions and matrix products, each counted once a simdgroup
    partial_collectives: int  # those that some lanes of the simdgroup did not take part in


class Checker:
    """Runs kernels like `mx.fast.metal_kernel`, and detects behavior that is undefined on a GPU.

    Kernels raise `KernelViolation` for an access outside of a buffer or threadgroup variable, for
    data races between threads (found under any schedule), for threads that wait for each other
    forever, for reads of uninitialized threadgroup memory or outputs, and for more than 32 KB of
    threadgroup memory.

    Args:
        schedule: "forward", "reverse" or "random:SEED", the order in which threads run.
    """

    def __init__(self, schedule: str = "forward") -> None:
        self.dispatches: list[Dispatch] = []
        executor = Executor(toolchain.CHECK, Schedule.parse(schedule), self._record)
        self.metal_kernel = executor.metal_kernel

    def _record(self, kernel: str, buffers: Sequence[Buffer], result: Result) -> None:
        counters = result.counters
        traffic = {
            buffer.name: Traffic(
                t.read_bytes,
                t.written_bytes,
                t.lines_read,
                t.lines_written,
                t.unique_lines_read_by_threadgroup,
            )
            for buffer, t in zip(buffers, result.traffic, strict=True)
        }
        self.dispatches.append(
            Dispatch(
                kernel,
                MappingProxyType(traffic),
                counters.threadgroups,
                counters.threadgroup_bytes,
                counters.barriers / counters.threadgroups,
                counters.simd_collectives,
                counters.partial_collectives,
            )
        )
