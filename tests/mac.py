# SPDX-License-Identifier: Apache-2.0
"""Fakes a Mac's memory values in this process, in system calls and psutil."""

import ctypes
import errno
from dataclasses import dataclass
from types import SimpleNamespace

PAGE = 16384


@dataclass(frozen=True)
class Mac:
    """Pages, each of one kind, as xnu counts them; what is left of `ram` bytes is wired or holds
    compressed pages. `purgeable` of the anonymous ones; half of those that are neither free nor
    speculative are inactive, as macOS aims at."""

    free: int
    speculative: int
    files: int  # including speculative ones
    anonymous: int
    purgeable: int = 0
    ram: int = 16 * 2**30
    gpu_share: float = 2 / 3  # Metal's recommendation of 16 GB: 10922.67 MiB

    @property
    def pageable(self) -> int:
        return self.free + self.files + self.anonymous

    @property
    def psutil_available(self) -> int:
        """Bytes as in psutil 7: inactive pages, and free ones with speculative pages."""
        inactive = (self.files - self.speculative + self.anonymous) // 2
        return (self.free + self.speculative + inactive) * PAGE

    def numbers(self) -> dict[str, bytes]:
        """Values of `sysctl`, in the kernel's width (bsd/vm/vm_unix.c, bsd/kern/kern_mib.c)."""
        counts = {
            "vm.page_free_count": self.free,
            "vm.page_speculative_count": self.speculative,
            "vm.page_pageable_external_count": self.files,
            "vm.page_pageable_internal_count": self.anonymous,
            "vm.page_purgeable_count": self.purgeable,
            "kern.memorystatus_level": 100 * self.pageable * PAGE // self.ram,
            "kern.memorystatus_vm_pressure_level": 1,
        }
        sizes = {"hw.pagesize": PAGE, "hw.memsize": self.ram}
        return {name: number.to_bytes(4, "little") for name, number in counts.items()} | {
            name: number.to_bytes(8, "little") for name, number in sizes.items()
        }

    def take_over(self, monkeypatch, missing: tuple[str, ...] = ()) -> None:
        """Makes this process see such a Mac, whose kernel lacks the values `missing`."""
        numbers = {name: n for name, n in self.numbers().items() if name not in missing}
        tell_numbers(monkeypatch, numbers)
        memory = SimpleNamespace(total=self.ram, available=self.psutil_available)
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
        monkeypatch.setattr("sys.platform", "darwin")
        working_set = {"max_recommended_working_set_size": int(self.ram * self.gpu_share)}
        monkeypatch.setattr("mlx.core.device_info", lambda device: working_set)


def tell_numbers(monkeypatch, numbers: dict[str, bytes]) -> None:
    """Replaces the C library's `sysctlbyname`."""

    def sysctlbyname(name, old, old_size, new, new_size):
        size = ctypes.cast(old_size, ctypes.POINTER(ctypes.c_size_t)).contents
        number = numbers.get(name.decode())
        if number is None or new is not None:
            ctypes.set_errno(errno.ENOENT)
            return -1
        if size.value < len(number):
            ctypes.set_errno(errno.ENOMEM)
            return -1
        ctypes.memmove(old, number, len(number))
        size.value = len(number)
        return 0

    library = SimpleNamespace(sysctlbyname=sysctlbyname)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)


#: `sysctl -a` of a 16 GB Mac with an M1 and open programs, reported by its owner
#: (github.com/OCSInventory-NG/UnixAgent/issues/436): 6 GB are wired or compressed.
BUSY = Mac(free=3025, speculative=150, files=138_574, anonymous=450_876)
#: The same Mac with two thirds of its memory wired or compressed.
FULL = Mac(free=3025, speculative=150, files=45_000, anonymous=300_000)
IDLE = Mac(free=600_000, speculative=20_000, files=120_000, anonymous=100_000, purgeable=5_000)
