# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of proxy.md with the proxy's costs.

    PYTHONPATH=. .venv/bin/python -m tests.metal_kernels.proxy_page

One table has our kernels by use, the other MLX's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metal_interpreter.proxy import FAST_SUM, SLOW_SUM, Call

from tests.metal_kernels import mlx_attention
from tests.metal_kernels.budgets import Budget, keys_of, measured
from tests.metal_kernels.proxy_uses import Use, uses

PAGE = Path(__file__).with_name("proxy.md")
_COLUMNS = "registers, loop / all | loads before each wait | slots a key, at 4 / 10.5"
_ALIGNED = "| --- | --- | ---: | --- | ---: | --- | ---: |"
_OURS = f"| launched for | size | bits | kernel | {_COLUMNS} |"
_MLX = f"| MLX's kernel | size | registers | {_COLUMNS.partition(' | ')[2]} | on a Mac |"
_MLX_ALIGNED = "| --- | --- | ---: | --- | ---: | --- |"


@dataclass(frozen=True)
class Row:
    """The largest costs of some calls, and the loads of the first."""

    what: str
    size: str
    bits: int
    kernel: str
    loop_registers: int
    registers: int
    loads: tuple[int, ...]
    slots: tuple[int, int] | None  # with FAST_SUM and SLOW_SUM

    @staticmethod
    def of(what: str, size: str, bits: int, calls: Sequence[Call]) -> Row:
        """Makes the row for calls of one kernel, the first with the loads to show."""
        figures = [measured(call) for call in calls]
        keys = [keys_of(call) for call in calls]

        def slots(of_sum: float) -> float:
            return max(f.slots(of_sum) / k for f, k in zip(figures, keys, strict=True) if k)

        return Row(
            what,
            size,
            bits,
            calls[0].kernel,
            max(f.loop_registers for f in figures),
            max(f.registers for f in figures),
            tuple(batch.count for batch in figures[0].batches),
            (round(slots(FAST_SUM)), round(slots(SLOW_SUM))) if all(keys) else None,
        )

    def __str__(self) -> str:
        """Formats a line of the table."""
        cells = (
            *(self.what, self.size, self.bits, self.kernel),
            f"{self.loop_registers} / {self.registers}",
            _loads(self.loads),
            "–" if self.slots is None else f"{self.slots[0]} / {self.slots[1]}",
        )
        return f"| {' | '.join(map(str, cells))} |"

    @staticmethod
    def read(line: str) -> Row | None:
        """Parses a line of the page; None if it is not a row."""
        cells = [cell.strip() for cell in line.strip("|\n").split("|")]
        if len(cells) != _ALIGNED.count("|") - 1 or not cells[2].isdigit():
            return None
        what, size, bits, kernel, registers, loads, slots = cells
        loop_registers, of_all = map(int, registers.split(" / "))
        fast, _, slow = slots.partition(" / ")
        counts = (part.split(" × ") for part in loads.split(", ") if part != "–")
        return Row(
            *(what, size, int(bits), kernel, loop_registers, of_all),
            tuple(int(n) for n, *times in counts for _ in range(int(times[0]) if times else 1)),
            (int(fast), int(slow)) if slow else None,
        )

    @property
    def budget(self) -> Budget:
        """Limits for the use's calls until the table is rewritten; never scratch memory."""
        return Budget(
            self.loop_registers,
            self.registers,
            waits=len(self.loads),
            slots=None if self.slots is None else self.slots[1] + 0.5,
        )


def _loads(loads: Sequence[int]) -> str:
    """Formats loads like `1, 8 × 2`: a count, and its repetitions."""
    runs: list[list[int]] = []
    for count in loads:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ", ".join(f"{n} × {times}" if times > 1 else f"{n}" for n, times in runs) or "–"


def of_use(use: Use) -> Row:
    """Makes the row of a use."""
    return Row.of(use.what, use.size, use.bits, use.calls())


def _of_mlx(attention: mlx_attention.Attention) -> str:
    """Formats a line of MLX's table."""
    figures = measured(attention.call())
    fast, slow = (figures.slots(of_sum) / attention.keys for of_sum in (FAST_SUM, SLOW_SUM))
    loads = _loads([batch.count for batch in figures.batches])
    return (
        f"| `{attention.kernel}` | {attention.size} | {figures.registers} | {loads} | "
        f"{fast:.0f} / {slow:.0f} | {attention.on_a_mac} |"
    )


def written() -> dict[str, Row]:
    """Returns the page's rows by `str(use)`."""
    rows = filter(None, map(Row.read, PAGE.read_text(encoding="utf-8").splitlines()))
    return {f"{row.what}, {row.size}, {row.bits} bit": row for row in rows}


def rewritten(page: str) -> str:
    """Returns the page with updated tables.

    Raises:
        ValueError: it has no such tables.
    """
    tables = (
        (_OURS, _ALIGNED, [str(of_use(use)) for use in uses()]),
        (_MLX, _MLX_ALIGNED, [_of_mlx(attention) for attention in mlx_attention.CALLS]),
    )
    for head, aligned, rows in tables:
        table = "\n".join([head, aligned, *rows, ""])
        page, count = re.subn(rf"{re.escape(head)}\n(\|.*\n)*", lambda _, t=table: t, page)
        if count != 1:
            raise ValueError(f"the page has {count} tables that begin with {head}")
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
