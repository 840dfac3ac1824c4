# SPDX-License-Identifier: Apache-2.0
"""Decides into which parts the contexts of a dispatch are cut, and whether any is cut at all."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt

import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS

#: A context of up to so many keys is in one part: a threadgroup with a core to itself walks them in
#: some 8 rounds of a microsecond, and a reduction takes as long.
WHOLE = 256
#: The shortest part, two rounds of a threadgroup, where a step has less work than threadgroups.
_SHORTEST = 64
#: What the reduction costs, in keys: 3 µs for a small dispatch that waits for another (2 µs in
#: qwisp#143, 6 µs on an M3 Ultra in mlx-vlm#2105) at 7 keys a µs, a slot's share of bandwidth for
#: heads of 128 in 16 bits (800 GB/s over 240 slots; 100 over 30).
_JOIN = 20
#: Keys that cost what it takes to read a row of a part's result, in float32. From so many rows on,
#: a key's time is arithmetic and grows with the rows as well.
_ROW, _LOADING_ROWS = 1, 16
#: Bytes of the results of all parts of a dispatch, about; no budget counts them, and three layers
#: may be under way. So many rows of a prompt as would exceed it have tiles enough.
MOST_RESULTS = 2**25
#: The most rows of a request in fixed parts: more are a prompt's, which has tiles enough.
MOST_FIXED_ROWS = 16


#: Walks that a reduction takes a row's parts by, whose results it joins: one after the other in a
#: simdgroup, or side by side in as many.
WALKS = 8


def join_cost(parts: float) -> float:
    """What a reduction costs, in keys: a key's time for each part that a simdgroup walks in turn.

    Many are walked side by side; to join the walks takes the time of one part each.
    """
    return _JOIN + min(parts, WALKS + parts / WALKS)


def parts_ahead(value_size: int) -> int:
    """Parts of a row that a simdgroup of reduce.metal loads at once."""
    return 16 // -(-value_size // 32)


@dataclass(frozen=True)
class Splits:
    """What decides where contexts are cut. A machine's own may take the place of the defaults."""

    #: What a part costs beside its keys, in keys: queries, tables, sums over simdgroups. Guessed.
    part_cost: int = 24
    #: Threadgroups that the GPU has under way at once.
    #: 24 cores, where they are not known: no GPU of 8 to 80 is more than 3.4 times off, so that
    #: parts are 1.8 times too long or too short.
    slots: int = 3 * 24
    #: Keys of every part, a multiple of 16, WHOLE at least; None: what fits a step's work. With it
    #: a row's parts do not depend on the requests beside it.
    fixed: int | None = None
    #: Simdgroups that join a row's parts: 1, 2, 4 or 8; None: what a dispatch is quickest with.
    joined_by: int | None = None

    @staticmethod
    def of_gpu(cores: int | None, fixed: int | None = None) -> Splits:
        """Three threadgroups of 256 threads a core: 68 registers a thread leave room for them.

        The source is Mesa's table of M1's and M2's cores (agx_performance.c).

        Args:
            cores: of the GPU; None: unknown.
            fixed: keys of every part; None: what fits a step's work.
        """
        return Splits(fixed=fixed) if cores is None else Splits(slots=3 * cores, fixed=fixed)

    def has_room_for_wide(self, num_tiles: int) -> bool:
        """Whether threadgroups of 512 threads for so many tiles are all under way at once.

        With more of them, smaller ones hide each other's waits better.
        """
        return 2 * num_tiles <= self.slots

    def walkers(self, num_rows: int, most_parts: int, value_size: int) -> int:
        """Simdgroups that walk a row's parts in a reduction: 1, 2, 4 or 8. No result depends on it.

        The time of the dispatch in rounds, each of which waits for memory: one that finds the row,
        those of the longest walk, and one's time to join walks of several simdgroups; for as many
        times as the rows do not fit the GPU at once.

        Args:
            num_rows: of all heads.
            most_parts: of any row.
            value_size: elements of a row.
        """
        if self.joined_by is not None:
            return self.joined_by
        rounds = -(-most_parts // parts_ahead(value_size))

        def duration(walkers: int) -> int:
            turns = -(-num_rows * walkers // (WALKS * self.slots))
            return turns * (1 + -(-rounds // walkers) + (walkers > 1))

        return min((1, 2, 4, WALKS), key=duration)

    def cut(self, contexts: Contexts) -> Parts:
        """Cuts each context of a dispatch, or none of them."""
        if self.fixed is not None:
            prompts = contexts.query_rows > MOST_FIXED_ROWS
            return contexts.cut(self.fixed, prompts if prompts.any() else None)
        length = self._length(contexts)
        return contexts.whole() if length is None else contexts.cut(length)

    def _length(self, contexts: Contexts) -> int | None:
        """Keys of a part, L; None where the reduction costs more than it saves.

        What a slot has to do beyond its share of the work is about L / 2 + part_cost * share / L,
        and least near L = sqrt(part_cost * share). A power of two stays for many steps.
        """
        keys, heads = contexts.certain, contexts.num_heads
        longest = int(keys.max())
        if longest <= WHOLE:
            return None
        total, tiles = int(keys.sum()) * heads, len(keys) * heads
        further = contexts.most_results // contexts.result_bytes - tiles  # parts
        if further <= 0:
            return None
        share = total / self.slots
        best = max(sqrt(self.part_cost * share), total / further, _SHORTEST)
        length: int = 1 << round(log2(best))
        if longest <= length:
            return None
        cost = self.part_cost + _ROW * min(contexts.tile_rows, _LOADING_ROWS)
        in_parts = share + (total / length + tiles) * cost / self.slots + length / 2
        in_parts += join_cost(longest / length)
        return length if in_parts < self._end_of_whole(longest, share, tiles, heads) else None

    def _end_of_whole(self, longest: int, share: float, tiles: int, heads: int) -> float:
        """When the last of whole contexts ends, in keys.

        The GPU takes a head's tiles, the longest first, then those of the next head, each when a
        slot is free (Graham 1969). So either the last head's longest tile ends last, or one of the
        many that are about average.
        """
        if tiles <= self.slots:
            return longest
        last = max(share - share / heads + longest, share + share * self.slots / tiles)
        return last + tiles * self.part_cost / self.slots


DEFAULT = Splits()
#: Cuts every context of more than WHOLE, as a GPU with any number of cores may.
ALWAYS = Splits(slots=2**30)


@dataclass(frozen=True)
class Contexts:
    """What N tiles see, in the order of the I pieces of batch rows that they are cut from."""

    begin: np.ndarray  # [N] int, first position that may be seen
    end: np.ndarray  # [N] int, past the last that may be
    seen: np.ndarray  # [N] int, keys between
    certain: np.ndarray  # [N] int, those that are there if the context is as short as it may be
    piece: np.ndarray  # [N] int
    first_tile: np.ndarray  # [I] int, of each piece
    query_rows: np.ndarray  # [I] int, rows of the piece's request in this step
    tile_rows: int  # packed rows of the largest tile
    result_bytes: int  # of a part's result, of one of the heads
    num_heads: int  # Hkv, each of which has these tiles
    most_results: int = MOST_RESULTS  # bytes of the results of all parts

    def whole(self) -> Parts:
        """One part a tile."""
        tile = np.arange(len(self.piece))
        ones = np.ones_like(self.first_tile)
        return Parts(tile, np.zeros_like(tile), self.begin, self.end, ones)

    def cut(self, length: int, whole: np.ndarray | None = None) -> Parts:
        """Parts of `length` keys.

        All tiles of a piece get as many: those that see fewer keys have empty parts.

        Args:
            length: of each part but the last.
            whole: [I] bool, pieces that are not cut; None: all are.
        """
        counts = np.maximum.reduceat(-(-self.seen // length), self.first_tile)
        if whole is not None:
            counts[whole] = 1
        of_tile = counts[self.piece]
        tile = np.arange(len(of_tile)).repeat(of_tile)
        number = np.arange(len(tile)) - (of_tile.cumsum() - of_tile)[tile]
        begin = self.begin[tile] + number * length
        end = self.end[tile]
        if whole is None:
            end = np.minimum(end, begin + length)
        else:
            end = np.where(whole[self.piece[tile]], end, np.minimum(end, begin + length))
        return Parts(tile, number, begin, end, counts)


@dataclass(frozen=True)
class Parts:
    """P parts of tiles' contexts, tile by tile."""

    tile: np.ndarray  # [P] int
    number: np.ndarray  # [P] int, which part of the tile's context
    begin: np.ndarray  # [P] int, first position
    end: np.ndarray  # [P] int, past the last; not above `begin` in an empty part
    counts: np.ndarray  # [I] int, parts of each tile, and row, of a piece

    def of_rows(self, num_rows: np.ndarray) -> np.ndarray:
        """[max(n, 2), 4] int32: struct Row of reduce.metal, of pieces of [I] output rows.

        None of them shares a beginning yet.
        """
        counts = self.counts.repeat(num_rows)
        rows = np.zeros((max(len(counts), MIN_ELEMENTS // 4), 4), np.int32)
        made = rows[: len(counts)]
        made[:, 0] = counts.cumsum() - counts
        made[:, 1] = counts
        return rows
