# SPDX-License-Identifier: Apache-2.0
"""Runs a compiled kernel: fills the structures of runtime/dispatch.h and calls the runtime."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import lines, toolchain


class KernelViolation(RuntimeError):
    """A kernel's behavior would be undefined on a GPU.

    Attributes:
        kernel: name given to `metal_kernel`.
        kind: "out_of_bounds", "race", "divergence", "uninitialized" or "threadgroup_memory".
    """

    def __init__(self, kernel: str, kind: str, text: str) -> None:
        super().__init__(f"{kernel}: {kind}: {text}")
        self.kernel = kernel
        self.kind = kind


@dataclass(frozen=True)
class Schedule:
    """The order in which threads, simdgroups and threadgroups run."""

    order: int  # runtime/dispatch.h: Order
    seed: int = 0

    @staticmethod
    def parse(text: str) -> Schedule:
        """Parses "forward", "reverse" or "random:SEED"; raises ValueError for other texts."""
        if text == "forward":
            return Schedule(0)
        if text == "reverse":
            return Schedule(1)
        match = re.fullmatch(r"random:(\d+)", text)
        if match is None:
            raise ValueError(f"schedule is 'forward', 'reverse' or 'random:SEED', not {text!r}")
        return Schedule(2, int(match.group(1)))


@dataclass(frozen=True)
class Buffer:
    """Memory of one buffer argument of a kernel."""

    name: str
    address: int
    nbytes: int
    element_bytes: int
    kind: int  # runtime/dispatch.h: BufferKind
    initialized: bool


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("element_bytes", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("initialized", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
    )


class BufferTraffic(ctypes.Structure):
    _fields_ = (
        ("read_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("lines_read", ctypes.c_uint64),
        ("lines_written", ctypes.c_uint64),
        ("unique_lines_read_by_threadgroup", ctypes.c_uint64),
    )


class Counters(ctypes.Structure):
    _fields_ = (
        ("threadgroups", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("simd_collectives", ctypes.c_uint64),
        ("partial_collectives", ctypes.c_uint64),
        ("traffic", ctypes.POINTER(BufferTraffic)),
    )


class _Violation(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char * 32), ("text", ctypes.c_char * 1024))


@dataclass(frozen=True)
class Result:
    """The runtime's counters for one dispatch; in check mode, also each buffer's traffic."""

    program: Program
    counters: Counters
    traffic: Sequence[BufferTraffic]


@dataclass(frozen=True)
class Program:
    """A compiled kernel that is loaded into this process."""

    library: Path
    entry: int
    run: Callable[..., None]
    lock: threading.Lock  # the runtime keeps one dispatch's state


@cache
def load(library: Path, mode: toolchain.Mode) -> Program:
    run, lock = _runtime(toolchain.build_runtime(mode))
    kernel = ctypes.CDLL(str(library))
    entry = ctypes.cast(kernel.metal_cpu_entry, ctypes.c_void_p).value
    assert entry is not None
    return Program(library, entry, run, lock)


@cache
def _runtime(path: Path) -> tuple[Callable[..., None], threading.Lock]:
    if sys.platform == "linux":
        # Kernels call libm without being linked with it, and Python may not have loaded it.
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    function = ctypes.CDLL(str(path)).metal_cpu_run
    function.argtypes = (
        ctypes.POINTER(_Launch),
        ctypes.POINTER(Counters),
        ctypes.POINTER(_Violation),
    )
    function.restype = None
    return function, threading.Lock()


def dispatch(
    program: Program,
    kernel: str,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    schedule: Schedule,
) -> Result:
    """Runs the kernel to its end, with the GIL released.

    Raises:
        KernelViolation: the runtime detected behavior that is undefined on a GPU.
    """
    bound = (_Buffer * len(buffers))(
        *(
            _Buffer(b.name.encode(), b.address, b.nbytes, b.element_bytes, b.kind, b.initialized)
            for b in buffers
        )
    )
    traffic = (BufferTraffic * len(buffers))()
    launch = _Launch(
        program.entry,
        bound,
        len(buffers),
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*threadgroup),
        schedule.order,
        schedule.seed,
    )
    counters = Counters(traffic=traffic)
    violation = _Violation()
    with program.lock:
        program.run(ctypes.byref(launch), ctypes.byref(counters), ctypes.byref(violation))
    if violation.kind:
        text = lines.resolve(
            violation.text.decode(errors="replace"), program.entry, program.library
        )
        raise KernelViolation(kernel, violation.kind.decode(), text)
    return Result(program, counters, tuple(traffic))
