# SPDX-License-Identifier: Apache-2.0
"""Decides whether and where to split the contexts of a dispatch into parts."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt

import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS

#: Contexts of up to this many keys stay whole: a threadgroup with a core to itself walks them in
#: some 8 rounds of a microsecond, and a reduction takes as long.
WHOLE = 256
#: Shortest part, two rounds of a threadgroup, for steps with less work than threadgroups.
_SHORTEST = 64
#: Cost of the reduction, in keys: 3 µs for a small dispatch that waits for another (2 µs in
#: qwisp#143, 6 µs on an M3 Ultra in mlx-vlm#2105) at 7 keys per µs, a slot's share of bandwidth for
#: heads of 128 in 16 bits (800 GB/s over 240 slots; 100 over 30).
_JOIN = 20
#: Cost in keys of reading a float32 row of a part's result. From this many rows on, a key's time is
#: arithmetic, and also grows with the rows.
_ROW, _LOADING_ROWS = 1, 16
#: Approximate limit of the bytes of all parts' results of a dispatch; no budget counts them, and
#: three layers may be in flight. Prompts with enough rows to exceed it have enough tiles.
MOST_RESULTS = 2**25
#: Most rows of a request in fixed parts: more are a prompt's, which has enough tiles.
MOST_FIXED_ROWS = 16


#: Walks over a row's parts in a reduction, whose results it joins: sequential in one simdgroup, or
#: parallel in up to as many.
WALKS = 8


def join_cost(parts: float) -> float:
    """Estimates the time of joining `parts` partial results, in units of a key's time.

    A simdgroup reads a part per unit; up to WALKS read in parallel, and take a unit each to join.
    """
    return _JOIN + min(parts, WALKS + parts / WALKS)


def parts_ahead(value_size: int) -> int:
    """Returns the parts of a row that a simdgroup of reduce.metal loads at once."""
    return 16 // -(-value_size // 32)


@dataclass(frozen=True)
class Splits:
    """Parameters for splitting contexts. The tuner may replace the defaults."""

    #: Cost of a part beside its keys, in keys: queries, tables, sums over simdgroups. An estimate.
    part_cost: int = 24
    #: Threadgroups in flight on the GPU, by default for 24 cores. GPUs have 8 to 80, so this is off
    #: by a factor of at most 3.4, and parts by 1.8.
    slots: int = 3 * 24
    #: Keys of every part, a multiple of 16 and at least WHOLE; None: chosen for a step's work. If
    #: set, a row's parts do not depend on the other requests.
    fixed: int | None = None
    #: Simdgroups that join a row's parts: 1, 2, 4 or 8; None: the fastest for a dispatch.
    joined_by: int | None = None

    @staticmethod
    def of_gpu(cores: int | None, fixed: int | None = None) -> Splits:
        """Returns the parameters for a GPU, if its number of cores is known."""
        # Three threadgroups of 256 threads fit a core at 68 registers per thread (Mesa's table of
        # M1's and M2's cores, agx_performance.c).
        return Splits(fixed=fixed) if cores is None else Splits(slots=3 * cores, fixed=fixed)

    def has_room_for_wide(self, num_tiles: int) -> bool:
        """Returns whether threadgroups of 512 threads for this many tiles all run at once."""
        # If not, smaller threadgroups hide each other's memory latency better.
        return 2 * num_tiles <= self.slots

    def walkers(self, num_rows: int, most_parts: int, value_size: int) -> int:
        """Returns how many simdgroups join a row's parts: 1, 2, 4 or 8. Affects only the speed.

        `num_rows`: rows of all heads; `most_parts`: most parts of a row.
        """
        if self.joined_by is not None:
            return self.joined_by
        rounds = -(-most_parts // parts_ahead(value_size))

        # In rounds that each wait for memory: one to find the row, those of the longest walk, and
        # one to join the walks of several simdgroups; repeated if the rows exceed the GPU's slots.
        def duration(walkers: int) -> int:
            turns = -(-num_rows * walkers // (WALKS * self.slots))
            return turns * (1 + -(-rounds // walkers) + (walkers > 1))

        return min((1, 2, 4, WALKS), key=duration)

    def cut(self, contexts: Contexts) -> Parts:
        """Splits the contexts of a dispatch into parts, or leaves all whole if that is faster."""
        if self.fixed is not None:
            prompts = contexts.query_rows > MOST_FIXED_ROWS
            return contexts.cut(self.fixed, prompts if prompts.any() else None)
        length = self._part_length(contexts)
        return contexts.whole() if length is None else contexts.cut(length)

    def _part_length(self, contexts: Contexts) -> int | None:
        """Returns the keys per part, L; None if the reduction costs more than it saves."""
        # Beyond its share of the work, a slot has to do about L / 2 + part_cost * share / L, which
        # is least near L = sqrt(part_cost * share). A power of two stays the same for many steps.
        keys, heads = contexts.certain, contexts.num_heads
        longest = int(keys.max())
        if longest <= WHOLE:
            return None
        total, tiles = int(keys.sum()) * heads, len(keys) * heads
        further = contexts.most_results // contexts.result_bytes - tiles  # room for more parts
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
        """Estimates the time to compute all contexts unsplit, in units of a key's time."""
        # The GPU takes a head's tiles, longest first, then those of the next head, each when a slot
        # is free (Graham 1969). So either the last head's longest tile ends last, or one of the
        # many average ones.
        if tiles <= self.slots:
            return longest
        last = max(share - share / heads + longest, share + share * self.slots / tiles)
        return last + tiles * self.part_cost / self.slots


DEFAULT = Splits()
#: Splits every context longer than WHOLE, as on a GPU with any number of cores.
ALWAYS = Splits(slots=2**30)


@dataclass(frozen=True)
class Contexts:
    """The contexts of N tiles, in the order of the I pieces that they belong to."""

    begin: np.ndarray  # [N] int, first position that may be visible
    end: np.ndarray  # [N] int, one past the last
    seen: np.ndarray  # [N] int, keys in between
    certain: np.ndarray  # [N] int, keys of the shortest context within the lag
    piece: np.ndarray  # [N] int
    first_tile: np.ndarray  # [I] int
    query_rows: np.ndarray  # [I] int, rows of the piece's request in this step
    tile_rows: int  # packed rows of the largest tile
    result_bytes: int  # of a part's result for one head
    num_heads: int  # Hkv, each with all these tiles
    most_results: int = MOST_RESULTS  # limit of the bytes of all parts' results

    def whole(self) -> Parts:
        """Returns one part per tile."""
        tile = np.arange(len(self.piece))
        ones = np.ones_like(self.first_tile)
        return Parts(tile, np.zeros_like(tile), self.begin, self.end, ones)

    def cut(self, length: int, whole: np.ndarray | None = None) -> Parts:
        """Returns parts of `length` keys; pieces where `whole`, [I] bool, is set stay unsplit.

        All tiles of a piece get equally many parts; some parts of tiles with fewer keys are empty.
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
    """P parts of tiles' contexts, in the order of tiles."""

    tile: np.ndarray  # [P] int
    number: np.ndarray  # [P] int, index of the part in its tile's context
    begin: np.ndarray  # [P] int, first position
    end: np.ndarray  # [P] int, one past the last; not above `begin` for an empty part
    counts: np.ndarray  # [I] int, parts per tile and row of a piece

    def of_rows(self, num_rows: np.ndarray) -> np.ndarray:
        """Returns first part and number of parts of n output rows, [max(n, 2), 4] int32.

        The layout is that of struct Row of reduce.metal; its columns for shared prefixes are 0.

        num_rows: [I] output rows of each piece of a context; their sum is n.
        """
        counts = self.counts.repeat(num_rows)
        rows = np.zeros((max(len(counts), MIN_ELEMENTS // 4), 4), np.int32)
        made = rows[: len(counts)]
        made[:, 0] = counts.cumsum() - counts
        made[:, 1] = counts
        return rows
