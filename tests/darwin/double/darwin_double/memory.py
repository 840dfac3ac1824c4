# SPDX-License-Identifier: Apache-2.0
"""Imitates macOS's memory and machine values in psutil and `sysctlbyname`.

A Mac's pages are free, speculative, active, inactive or wired; some of the active and inactive ones
are purgeable or hold files. Variables set the sizes in bytes, so that children inherit them:

- DARWIN_DOUBLE_TOTAL (this machine's)
- DARWIN_DOUBLE_AVAILABLE (this machine's): psutil's `available`, which is free and inactive pages
- DARWIN_DOUBLE_FILES (a quarter of the rest): pages that hold files, active ones and all
  speculative ones
- DARWIN_DOUBLE_SPECULATIVE (0), DARWIN_DOUBLE_PURGEABLE (0): the latter hold no files
- DARWIN_DOUBLE_PRESSURE (1): kern.memorystatus_vm_pressure_level
- DARWIN_DOUBLE_LEVEL: kern.memorystatus_level, in percent; by default the share of memory that is
  neither wired nor compressed (AVAILABLE_NON_COMPRESSED_MEMORY of xnu's osfmk/vm/vm_page.h)
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import psutil

PAGE = 16384
_real_virtual_memory = psutil.virtual_memory
#: psutil's fields on macOS.
svmem = namedtuple(
    "svmem", ["total", "available", "percent", "used", "free", "active", "inactive", "wired"]
)


def virtual_memory() -> svmem:
    """Calculates as psutil does on macOS: available = inactive + free, used = active + wired."""
    real = _real_virtual_memory()
    total = _variable("TOTAL", real.total)
    available = min(_variable("AVAILABLE", real.available), total)
    free, inactive = available // 4, available - available // 4
    wired = (total - available) // 4
    active = total - available - wired
    percent = round(100 * (total - available) / total, 1)
    return svmem(total, available, percent, active + wired, free, active, inactive, wired)


def _level() -> int:
    vm = virtual_memory()
    return _variable("LEVEL", 100 * (vm.total - vm.wired) // vm.total)


def _bytes_of(kind: str) -> int:
    vm = virtual_memory()
    return _variable(kind, (vm.total - vm.available) // 4 if kind == "FILES" else 0)


def _variable(name: str, otherwise: int) -> int:
    return int(os.environ.get(f"DARWIN_DOUBLE_{name}", otherwise))


def _uint(read: Callable[[], int]) -> Callable[[], bytes]:
    return lambda: read().to_bytes(4, "little")


def _quad(read: Callable[[], int]) -> Callable[[], bytes]:
    return lambda: read().to_bytes(8, "little")


def _text(value: str) -> Callable[[], bytes]:
    return lambda: value.encode() + b"\0"


#: Values of `sysctlbyname` in the kernel's width. Others do not exist (ENOENT): add them here.
SYSCTLS: dict[str, Callable[[], bytes]] = {
    "hw.memsize": _quad(lambda: virtual_memory().total),
    "hw.pagesize": _quad(lambda: PAGE),
    "hw.optional.arm64": _uint(lambda: 1),
    "hw.ncpu": _uint(lambda: os.cpu_count() or 1),
    "hw.model": _text("Mac16,1"),
    "machdep.cpu.brand_string": _text("Apple M4"),
    "sysctl.proc_translated": _uint(lambda: _variable("ROSETTA", 0)),
    "kern.osproductversion": lambda: _text(os.environ.get("DARWIN_DOUBLE_RELEASE", "15.5"))(),
    "kern.memorystatus_level": _uint(_level),
    "kern.memorystatus_vm_pressure_level": _uint(lambda: _variable("PRESSURE", 1)),
    "vm.page_free_count": _uint(lambda: virtual_memory().free // PAGE),
    "vm.page_speculative_count": _uint(lambda: _bytes_of("SPECULATIVE") // PAGE),
    "vm.page_purgeable_count": _uint(lambda: _bytes_of("PURGEABLE") // PAGE),
    "vm.page_pageable_external_count": _uint(lambda: _bytes_of("FILES") // PAGE),
    "vm.page_pageable_internal_count": _uint(
        lambda: (virtual_memory().active + virtual_memory().inactive - _bytes_of("FILES")) // PAGE
    ),
}


class _SysctlByName:
    """C's `sysctlbyname(name, old, old_size, new, new_size)`, read-only."""

    def __call__(self, name: Any, old: Any, old_size: Any, new: Any = None, size: Any = 0) -> int:
        key = getattr(name, "value", name)
        read = SYSCTLS.get(key.decode())
        if read is None:
            return _failed(errno.ENOENT)
        value = read()
        room = ctypes.cast(old_size, ctypes.POINTER(ctypes.c_size_t)).contents
        if address := _address(old):
            if room.value < len(value):
                return _failed(errno.ENOMEM)
            ctypes.memmove(address, value, len(value))
        room.value = len(value)
        return 0


def _address(pointer: Any) -> int | None:
    return None if pointer is None else ctypes.cast(pointer, ctypes.c_void_p).value


def _failed(error: int) -> int:
    ctypes.set_errno(error)
    return -1


#: Functions of notify.h: all succeed, and every state is 0, which means a nominal thermal level.
_NOTIFY = dict.fromkeys(
    ("notify_register_check", "notify_get_state", "notify_cancel"), lambda *arguments: 0
)


def install() -> None:
    psutil.virtual_memory = virtual_memory
    sysctlbyname = _SysctlByName()
    load, find = ctypes.CDLL.__init__, ctypes.CDLL.__getattr__

    def __init__(self: ctypes.CDLL, name: str | None, *args: Any, **options: Any) -> None:
        system = name is not None and os.path.basename(name) in ("libc.dylib", "libSystem.B.dylib")
        load(self, None if system else name, *args, **options)

    def __getattr__(self: ctypes.CDLL, name: str) -> Any:
        if name in _NOTIFY:
            return _NOTIFY[name]
        return sysctlbyname if name == "sysctlbyname" else find(self, name)

    ctypes.CDLL.__init__ = __init__  # type: ignore[method-assign]
    ctypes.CDLL.__getattr__ = __getattr__  # type: ignore[method-assign]
