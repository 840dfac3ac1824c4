# SPDX-License-Identifier: Apache-2.0
"""Decides which shared prefixes a dispatch reads once for all their requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from metal_kernels.paged_attention.common_prefix import any_shared, common_prefixes
from metal_kernels.paged_attention.pieces import Batch, Pieces
from metal_kernels.paged_attention.splits import MOST_RESULTS
from metal_kernels.paged_attention.tiles import NO_WINDOW, Tiles


@dataclass(frozen=True)
class SharedPrefixes:
    """G shared prefixes, and which one each of the P pieces of a dispatch has."""

    group: np.ndarray  # [P] int; -1: none
    keys: np.ndarray  # [G] int, in whole blocks
    rows: int  # packed rows of the tiles that read them

    @property
    def of_pieces(self) -> np.ndarray:
        """Length in keys of each piece's shared prefix, 0 without one, [P] int."""
        return np.append(self.keys, 0)[self.group]


def shared_prefixes(
    batch: Batch,
    pieces: Pieces,
    rows: int,
    tiles: Tiles,
    block_tables: np.ndarray,
    block_size: int,
) -> SharedPrefixes | None:
    """Returns the shared prefixes that are faster in a dispatch of their own; None if none are.

    `rows`: number of packed rows in a decode tile; `block_tables`: [R, W] int32.
    """
    if tiles.shared is None or not tiles.split or batch.window < NO_WINDOW:
        return None
    members, shape = pieces.request, batch.shape
    if len(members) < 2 or not any_shared(block_tables):
        return None  # in most steps
    if len(members) < len(block_tables):
        block_tables = block_tables[members]
    usable = batch.first_positions[members] - batch.most_behind[members]
    group, lengths = common_prefixes(block_tables, usable // block_size)
    if not len(lengths):
        return None
    shares = np.flatnonzero(group >= 0)
    packed = pieces.num_rows * shape.group
    together = np.bincount(group[shares], packed[shares]).astype(np.int64)
    # Tiles of 32 rows of 16-bit caches take about as long to compute as their keys to load, so
    # larger ones would save nothing.
    size = next((size for size in tiles.decode if size >= together.max()), tiles.decode[-1])
    apart = -(-packed // batch.packed_step(rows))
    before = np.bincount(group[shares], apart[shares]).astype(np.int64)
    after = -(-together // batch.packed_step(size))
    # Sharing pays if fewer tiles read the prefix, saving enough keys, without more arithmetic.
    pays = (before - after) * lengths * block_size >= max(tiles.shared, 1)
    pays &= after * shape.work(size, 1) <= before * shape.work(rows, 1)
    number = np.append(np.where(pays, pays.cumsum() - 1, -1), -1)
    group, lengths = number[group], lengths[pays]
    if not len(lengths) or 2 * int(packed.sum()) * _row_bytes(batch) > MOST_RESULTS:
        return None
    return SharedPrefixes(group, lengths * block_size, size)


def _row_bytes(batch: Batch) -> int:
    """Returns the bytes of one packed row's partial result, for all K/V heads."""
    return 4 * batch.shape.value_size * batch.shape.num_kv_heads
