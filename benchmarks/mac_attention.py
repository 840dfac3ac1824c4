# SPDX-License-Identifier: Apache-2.0
"""What binds attention of decode on a Mac, reckoned and not measured: issue slots or memory.

A core issues four simdgroup instructions a cycle. While memory gives it the bytes of a key and its
value, it has so many slots; how many the decode kernel needs, the proxy counts (the table of
docs/kernels.md). What needs more than it has is bound by arithmetic, and reaches at most their
quotient of the bandwidth. Prints the tables of docs/performance.md as Markdown: `python
benchmarks/mac_attention.py`; mac_tokens.py writes them there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import log10
from pathlib import Path

from _macs import CHIPS, Chip

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
LATENT = "576/512"
#: Packed rows of a tile, of which the proxy's figures are.
TILE_ROWS = 8
#: What needs more of its slots than this does not reach bandwidth in practice (docs/kernels.md).
SAFE = 0.75
_SCALE = 2  # bytes, of a row of 8-bit codes
_ROW = re.compile(r"\| decode, (\d+) heads? \| ([\d/]+) \| (\d+) \|.*\| (\d+) / (\d+) \|")


@dataclass(frozen=True)
class Needed:
    """Issue slots, by what a `simd_sum` counts: 4 as most instructions of its like, or 10.5."""

    fast: float
    slow: float

    def share(self, left: float) -> Needed:
        """Of the slots that there are."""
        return Needed(self.fast / left, self.slow / left)

    def times(self, factor: int) -> Needed:
        return Needed(self.fast * factor, self.slow * factor)


@dataclass(frozen=True)
class Kind:
    """Keys as the decode kernel reads them."""

    size: str  # of a head
    bits: int  # of the pool's elements
    group: int = TILE_ROWS  # query heads a K/V head

    @property
    def key_bytes(self) -> int:
        """Of a key and its value; of latents one is both."""
        rows = (576,) if self.size == LATENT else (int(self.size),) * 2
        return sum(row * self.bits // 8 + (_SCALE if self.bits == 8 else 0) for row in rows)

    @property
    def needed(self) -> Needed:
        """Slots a key: of a tile of eight rows, as often as the heads make one.

        Raises:
            KeyError: docs/kernels.md has no such row.
        """
        return slots()[self.size, self.bits].times(-(-self.group // TILE_ROWS))

    def share(self, chip: Chip) -> Needed:
        """Slots needed over those that memory leaves; from 1 on arithmetic binds."""
        return self.needed.share(chip.slots(self.key_bytes))

    def __str__(self) -> str:
        heads = f", {self.group} heads" if self.size == LATENT else ""
        return f"{self.size}, {self.bits} bit{heads}"


@cache
def slots() -> Mapping[tuple[str, int], Needed]:
    """Slots a key of up to eight packed rows by size and bits, as docs/kernels.md has them."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    return {
        (size, int(bits)): Needed(int(fast), int(slow))
        for heads, size, bits, fast, slow in _ROW.findall(page)
        if int(heads) <= TILE_ROWS or size == LATENT  # whose tiles have no more rows
    }


#: Llama and Qwen3 have heads of 128, gpt-oss of 64, Qwen3.5 and Gemma of 256; the latents are
#: DeepSeek-V3's and GLM-4.7-Flash's.
KINDS = (
    *(Kind(size, bits) for size in ("64", "128", "256") for bits in (16, 8)),
    *(Kind(LATENT, 16, group) for group in (20, 128)),
)


@dataclass(frozen=True)
class Published:
    """MLX's kernel for a head at a time, which eight heads of one K/V head run side by side."""

    size: int
    instructions: float  # a key and head, but sums, by the proxy
    heads: int
    measured: float  # share of the bandwidth, mlx#4076

    @property
    def needed(self) -> Needed:
        """With a sum a key and head."""
        return Needed(self.instructions + 4, self.instructions + 10.5).times(self.heads)


#: Where mlx#4076 was measured: GB/s are the copy's that it states, the clock is assumed.
MLX_CHIP = Chip("M5 Pro", 20, 266, 1.6, 64)
MLX = (
    Published(128, 33.25, 4, 0.99),
    Published(128, 33.25, 8, 0.71),
    Published(64, 25.25, 8, 0.45),
)


def percent(share: Needed) -> str:
    """Both, or one where they are the same."""
    fast, slow = f"{100 * share.fast:.0f}", f"{100 * share.slow:.0f}"
    return f"{fast} %" if fast == slow else f"{fast} / {slow} %"


def _of_chip(share: Needed) -> str:
    """Bold where arithmetic binds, in italics where it may."""
    mark = "**" if share.slow >= 1 else "*" if share.slow > SAFE else ""
    return f"{mark}{percent(share)}{mark}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are numbers, but the first."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rewrite(page: Path, tables: Sequence[str]) -> None:
    """Puts tables in the place of those with the same heads.

    Raises:
        ValueError: the page has not just one of each.
    """
    text = page.read_text()
    for table in tables:
        head = re.escape(table.partition("\n")[0])
        text, count = re.subn(rf"^{head}\n(\|.*\n)*", lambda _, t=table: f"{t}\n", text, flags=re.M)
        if count != 1:
            raise ValueError(f"{page} has {count} tables that begin with {head}")
    page.write_text(text)


def shares_table() -> str:
    """Markdown: by chip and kind of key, slots needed over slots left."""
    needed = [f"{kind.needed.fast:.0f} / {kind.needed.slow:.0f}" for kind in KINDS]
    rows = [["slots a key needs, at 4 / 10.5", "", *needed]]
    rows += [
        [_names(alike), f"{alike[0].bytes_a_cycle:.1f}"]
        + [_of_chip(kind.share(alike[0])) for kind in KINDS]
        for alike in _alike()
    ]
    return markdown(["estimate", "B a cycle", *map(str, KINDS)], rows)


def _alike() -> list[list[Chip]]:
    """Chips of a generation whose cores get as much, within a hundredth."""
    found: dict[tuple[str, float], list[Chip]] = {}
    for chip in CHIPS:
        near = round(100 * log10(chip.bytes_a_cycle))
        found.setdefault((chip.generation, near), []).append(chip)
    return list(found.values())


def _names(chips: Sequence[Chip]) -> str:
    """Such as `M1 Pro, Max, Ultra`."""
    first, *others = (chip.name for chip in chips)
    return ", ".join([first, *(name.split()[-1] for name in others)])


def check_table() -> str:
    """Markdown: the same sum for MLX's kernel, beside what was measured of it."""
    rows = []
    for one in MLX:
        left = MLX_CHIP.slots(4 * one.size)
        reached = Needed(*(min(left / each, 1) for each in (one.needed.fast, one.needed.slow)))
        rows.append(
            [
                f"{one.size}, {one.heads} heads",
                f"{one.needed.fast:.0f} / {one.needed.slow:.0f}",
                f"{left:.0f}",
                percent(reached),
                f"{100 * one.measured:.0f} %",
            ]
        )
    head = ["estimate", "slots a key needs, at 4 / 10.5", "left", "of bandwidth", "measured"]
    return markdown(head, rows)


if __name__ == "__main__":
    print(f"{shares_table()}\n\n{check_table()}")
