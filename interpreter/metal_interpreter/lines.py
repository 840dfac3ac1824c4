# SPDX-License-Identifier: Apache-2.0
"""Translates code addresses in the runtime's messages to files and lines of .metal sources."""

from __future__ import annotations

import bisect
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SITE = re.compile(r"\{site:(0x[0-9a-f]+)\}")


def resolve(text: str, entry: int, library: Path) -> str:
    """Replaces `{site:ADDRESS}` in a message with file and line.

    Removes it if the library's debug information cannot be read; without pyelftools, the message
    says so.
    """
    if "{site:" not in text:
        return text
    try:
        entry_offset, table = _table(library)
    except ImportError:  # pyelftools is optional
        return _SITE.sub("(file and line need the package pyelftools)", text)
    except Exception:  # not ELF, or debug information of another form
        return re.sub(f" {_SITE.pattern}", "", text)
    base = entry - entry_offset

    def place(match: re.Match[str]) -> str:
        # A return address belongs to the instruction after the call.
        found = _lookup(table, int(match.group(1), 16) - 1 - base)
        return found or "at an unknown line"

    return _SITE.sub(place, text)


def _lookup(table: list[tuple[int, str]], offset: int) -> str:
    index = bisect.bisect_right(table, (offset, "\U0010ffff")) - 1
    return table[index][1] if index >= 0 else ""


@cache
def _table(library: Path) -> tuple[int, list[tuple[int, str]]]:
    """Returns the offset of `metal_cpu_entry`, and sorted (offset, "file:line") pairs."""
    entry, found = rows(library)
    return entry, sorted((row.address, f"{row.file}:{row.line}") for row in found if row.file)


class Row(NamedTuple):
    """A source line and the address of its first instruction; the code ends at the next row's."""

    address: int
    file: str  # its name alone; empty where no line's instructions follow
    line: int


def rows(library: Path) -> tuple[int, list[Row]]:
    """Returns the address of `metal_cpu_entry` in a library, and its line table by address.

    Raises:
        ImportError: the package pyelftools is missing.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    with library.open("rb") as file:
        elf = ELFFile(file)
        exported = elf.get_section_by_name(".dynsym")
        assert isinstance(exported, SymbolTableSection)
        symbols = exported.get_symbol_by_name("metal_cpu_entry")
        assert symbols
        found = []
        dwarf = elf.get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            if program is None:
                continue
            names = [entry.name.decode() for entry in program["file_entry"]]
            first = 0 if program["version"] >= 5 else 1
            for entry in program.get_entries():
                state = entry.state
                if state is not None:
                    name = "" if state.end_sequence else Path(names[state.file - first]).name
                    found.append(Row(state.address, name, state.line))
        return symbols[0]["st_value"], sorted(found, key=lambda row: (row.address, row.file != ""))
