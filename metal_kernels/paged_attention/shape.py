# SPDX-License-Identifier: Apache-2.0
"""AttentionShape: heads and head sizes of a layer, and the tiles they allow."""

from __future__ import annotations

from dataclasses import dataclass

#: Sizes of keys and values if values are the first elements of keys (MLA): since DeepSeek-V2, a
#: rank of 512 and 64 rotated elements.
LATENT_SIZES = ((576, 512),)

#: Tiles with fewer rows count as this many, as their time goes into loading K and V. MOST_WORK is
#: then 17 GB of float16 K and V: 0.4 s at 40 of the 68 GB/s of an M1.
_LEAST_ROWS = 16


@dataclass(frozen=True)
class AttentionShape:
    """Heads and head sizes of one layer's attention."""

    num_heads: int  # H
    num_kv_heads: int  # Hkv
    head_size: int  # D, of queries and keys
    value_size: int  # DV

    @property
    def latent(self) -> bool:
        return (self.head_size, self.value_size) in LATENT_SIZES

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Largest number of packed rows of a request that the decode kernel serves."""
        # One tile, so that K and V are loaded once. But for latents of many heads, arithmetic takes
        # longer than loads, so each tile of up to eight query rows reads them again.
        return 8 * self.group if self.latent else self.decode_tile_rows

    @property
    def decode_tile_rows(self) -> int:
        """Packed rows of the decode kernel's largest tile, for threadgroups of 256 threads."""
        size = self.value_size if self.latent else self.head_size
        return 32 if size <= 128 else 16 if size <= 256 else 8

    @property
    def may_be_wide(self) -> bool:
        """Whether the decode kernel may use threadgroups of 512 threads for these heads."""
        # Smaller heads have eight walks in 256 threads. Larger ones have eight simdgroups per walk,
        # and threadgroup memory has no room for their joins.
        return 64 < self.head_size <= 256

    @property
    def tile_rows(self) -> int:
        """Packed rows of the prefill kernel's largest tile, for threadgroups of 256 threads."""
        # Every pipeline can run at least 384 threads, however many registers a thread needs (Mesa,
        # agx_performance.c), but not always 512.
        return 64 if self.head_size <= 128 else 32 if self.head_size <= 256 else 16

    def work(self, rows: int, keys: int) -> int:
        """Returns the FLOPs of tiles of `rows` packed rows over `keys` positions, for all heads."""
        products = 2 * (self.head_size + self.value_size)  # with a key and with its value
        return max(rows, _LEAST_ROWS) * keys * self.num_kv_heads * products
