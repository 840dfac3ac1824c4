# SPDX-License-Identifier: Apache-2.0
"""Pins: blocks that stay in the pool for a while because other engines have asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_metal.kv_transfer.shared_pool import PinChanges

#: Pins may hold one in this many of the blocks that no request holds, as requests of this engine
#: come first.
SHARE = 4


class Pins:
    """References that keep blocks in the pool. For the scheduler's thread only."""

    # A pin is best effort: a peer that finds its page gone computes it.

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, KVCacheBlock] = {}  # by key, oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def _most(self) -> int:
        return (self._pool.get_num_free_blocks() + len(self._blocks)) // SHARE

    def change(self, changes: PinChanges) -> None:
        """Unpins and pins the pages that the worker names, up to a share of the free blocks."""
        self._release(changes.unpin)
        for key in changes.pin[: max(0, self._most - len(self._blocks))]:
            block = self._pool.cached_block_hash_to_block.get_one_block(key)  # type: ignore[arg-type]
            if block is not None and key not in self._blocks:
                self._pool.touch([block])
                self._blocks[key] = block

    def free_excess(self) -> None:
        """Unpins the oldest blocks if pins exceed their share, as requests now hold more blocks."""
        self._release([*self._blocks][: max(0, len(self._blocks) - self._most)])

    def release_all(self) -> None:
        self._release([*self._blocks])

    def _release(self, keys: list[bytes] | tuple[bytes, ...]) -> None:
        blocks = [self._blocks.pop(key) for key in keys if key in self._blocks]
        # Newest first, as vLLM frees a request's blocks: it evicts in this order.
        self._pool.free_blocks(reversed(blocks))
