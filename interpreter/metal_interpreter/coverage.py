# SPDX-License-Identifier: Apache-2.0
"""Coverage mode: finds which lines of .metal files were executed.

Kernels are compiled without optimization, and each basic block sets its own flag. Debug information
maps a block's instructions to lines of the .metal file. A line is executable if any compiled
instantiation of the kernel's template has code for it, so branches that the template arguments rule
out in all instantiations do not count.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from . import lines, toolchain
from .kernel_call import Executor
from .launch import Buffer, Result, Schedule

_MODE = toolchain.Mode(
    "coverage",
    ("-O0", "-fsanitize-coverage=bb,inline-bool-flag,pc-table,no-prune"),
    (),
    (*toolchain.RUN.runtime_sources, "coverage.cpp"),
)

_Flags = npt.NDArray[np.uint8]


class Lines(NamedTuple):
    """Line numbers of one .metal file: those executed, and all executable ones."""

    executed: frozenset[int]
    executable: frozenset[int]

    @property
    def missed(self) -> list[int]:
        return sorted(self.executable - self.executed)


@dataclass(frozen=True)
class _Image:
    """A loaded kernel library: its basic blocks' flags and addresses, and its line table."""

    flags: _Flags  # of each block; what is set is reset by hand
    starts: npt.NDArray[np.uint64]  # where each begins, as an address within the library
    rows: list[lines.Row]

    def lines(self, executed: _Flags) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """Returns (file, line) pairs: of blocks flagged in `executed`, and of all blocks."""
        order = np.argsort(self.starts)
        addresses = np.array([row.address for row in self.rows], np.uint64)
        blocks = order[np.searchsorted(self.starts[order], addresses, side="right") - 1]
        found: tuple[set[tuple[str, int]], set[tuple[str, int]]] = (set(), set())
        for row, after, block in zip(self.rows, self.rows[1:], blocks, strict=False):
            if row.line and row.file.endswith(".metal") and row.address != after.address:
                found[1].add((row.file, row.line))
                if executed[block]:
                    found[0].add((row.file, row.line))
        return found


class Coverage:
    """Runs kernels like `mx.fast.metal_kernel`, and records which lines of .metal files they run.

    Raises:
        RuntimeError: the system is not Linux, or the package pyelftools is not installed.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise RuntimeError("Coverage of kernels reads ELF files: run it on Linux.")
        if importlib.util.find_spec("elftools") is None:
            raise RuntimeError(
                "Coverage of kernels reads debug information: pip install pyelftools"
            )
        self._executed: dict[tuple[Path, int], _Flags] = {}
        self.metal_kernel = Executor(_MODE, Schedule.parse("forward"), self._record).metal_kernel

    def report(self) -> dict[str, Lines]:
        """Maps .metal file names to their lines, over all kernels run so far."""
        executed: set[tuple[str, int]] = set()
        executable: set[tuple[str, int]] = set()
        for place, flags in self._executed.items():
            for whole, part in zip(
                (executed, executable), _image(*place).lines(flags), strict=True
            ):
                whole |= part
        return {
            file: Lines(
                frozenset(line for name, line in executed if name == file),
                frozenset(line for name, line in executable if name == file),
            )
            for file in sorted({name for name, _ in executable})
        }

    def _record(self, kernel: str, buffers: Sequence[Buffer], result: Result) -> None:
        place = (result.program.library, result.program.entry)
        flags = _image(*place).flags
        executed = self._executed.setdefault(place, np.zeros_like(flags))
        executed |= flags
        flags[:] = 0  # a library stays loaded; another Coverage must not see this run


@cache
def _image(library: Path, entry: int) -> _Image:
    """Reads a loaded library; `entry` is the address of its `metal_cpu_entry` in this process."""
    from elftools.elf.elffile import ELFFile

    offset, rows = lines.rows(library)
    base = entry - offset

    def section(name: str) -> _Flags:
        """Returns a section as loaded, with relocated addresses, not as stored in the file."""
        found = elf.get_section_by_name(name)
        assert found is not None
        raw = (ctypes.c_uint8 * found["sh_size"]).from_address(base + found["sh_addr"])
        return np.ctypeslib.as_array(raw)

    with library.open("rb") as file:
        elf = ELFFile(file)
        flags = section("__sancov_bools")
        pairs = section("__sancov_pcs").view(np.uint64)  # where a block begins, of what kind it is
    starts = pairs[::2] - np.uint64(base)
    # The linker leaves what it dropped in the table, at address 0.
    return _Image(flags, starts, [row for row in rows if row.address >= starts.min()])
