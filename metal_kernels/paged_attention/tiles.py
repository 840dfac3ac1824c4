# SPDX-License-Identifier: Apache-2.0
"""Tiles: the tile sizes that a layer's rows may need, each with its own pipeline."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from metal_kernels.paged_attention.common_prefix import LEAST_SAVED
from metal_kernels.paged_attention.shape import AttentionShape
from metal_kernels.paged_attention.splits import WHOLE

NO_WINDOW = 2**31 - 1
STRIP = 4  # contexts of tiles start at multiples of it
WIDE_ROWS = 8  # of tiles that may have 512 threads


@dataclass(frozen=True)
class Tiles:
    """Tile sizes for plans to choose from, in packed rows, ascending."""

    # Plans choose from nothing else: the self-check tries each, and each is compiled at startup.

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    split: bool  # whether contexts may be split, and their prefixes shared
    #: Keys that a shared prefix must save: its length times the tiles that need not read it. None:
    #: none is shared.
    shared: int | None = LEAST_SAVED
    #: Whether the smallest decode tile may have 512 threads, for few whole contexts.
    wide: bool = False

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def for_layer(shape: AttentionShape, window: int | None = None) -> Tiles:
        """Returns all tile sizes that layers of this shape and window may need."""
        decode, prefill = set(), set()
        most = shape.decode_rows + shape.tile_rows + shape.group
        for packed in range(shape.group, most, shape.group):
            rows = max(8, power_of_two(packed))
            if packed <= shape.decode_rows:
                decode.add(min(shape.decode_tile_rows, rows))
            else:
                prefill.add(min(shape.tile_rows, rows))
        longest = (window or NO_WINDOW) + shape.tile_rows + STRIP  # most keys of a tile
        sizes = tuple(sorted(decode)), tuple(sorted(prefill))
        return Tiles(*sizes, longest > WHOLE, wide=shape.may_be_wide and WIDE_ROWS in decode)

    def only(self, decode: bool, rows: int) -> Tiles:
        """Returns a copy with only one tile size, which then serves all rows."""
        return replace(self, decode=(rows,) if decode else (), prefill=() if decode else (rows,))


def power_of_two(count: int) -> int:
    """Rounds up to a power of two."""
    return 1 << (count - 1).bit_length()
