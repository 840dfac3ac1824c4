# SPDX-License-Identifier: Apache-2.0
"""Pins: blocks of the pool that stay for a while because other engines have asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_metal.kv_transfer.shared_pool import PinChanges

#: Of the blocks that no request holds, that pins may keep from being given to requests: one in so
#: many. Requests of this engine come first.
SHARE = 4


class Pins:
    """References on blocks, as a request has them, and fewer than would get in a request's way.

    The scheduler's thread calls all methods. Whoever asked may find a page gone, and computes it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, KVCacheBlock] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def _most(self) -> int:
        return (self._pool.get_num_free_blocks() + len(self._blocks)) // SHARE

    def change(self, changes: PinChanges) -> None:
        """Takes what the worker says of who waits for what; some find no room."""
        self._release(changes.unpin)
        for key in changes.pin[: max(0, self._most - len(self._blocks))]:
            block = self._pool.cached_block_hash_to_block.get_one_block(key)  # type: ignore[arg-type]
            if block is not None and key not in self._blocks:
                self._pool.touch([block])
                self._blocks[key] = block

    def make_way(self) -> None:
        """Lets go of what requests need: they hold more blocks than when these were pinned."""
        self._release([*self._blocks][: max(0, len(self._blocks) - self._most)])

    def release_all(self) -> None:
        """Lets go of all."""
        self._release([*self._blocks])

    def _release(self, keys: list[bytes] | tuple[bytes, ...]) -> None:
        blocks = [self._blocks.pop(key) for key in keys if key in self._blocks]
        self._pool.free_blocks(reversed(blocks))
