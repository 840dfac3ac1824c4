# SPDX-License-Identifier: Apache-2.0
"""Notes which blocks vLLM's prefix cache gains and loses, without the events that it can send."""

# Remove when vLLM tells a connector which blocks the prefix cache gains and loses. Read against
# vLLM 0.33.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockHashToBlockMap

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


@dataclass(frozen=True)
class CacheChanges:
    """What a step changes of the blocks that a prefix cache knows; picklable.

    A key is the hash of the text up to a block's end, and the block's KV cache group.
    """

    is_all: bool  # there are no others than those that come: the cache was reset
    come: Mapping[bytes, int]  # blocks by key, which are full once the step is computed
    gone: tuple[bytes, ...]  # keys of blocks that the step may write to


class CachedBlocks:
    """The blocks that a pool's prefix cache has, and how they change.

    vLLM's own events of the cache hold the tokens of each block, and leave the engine.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Puts a map in the place of the pool's own; it does what that does, and notes changes."""
        self._pool: Any = pool
        self._map: _NotingMap | None = None  # the first changes are all there is

    def take(self) -> CacheChanges | None:
        """What has changed since the last call; None: nothing."""
        noting = self._map
        if noting is None or self._pool.cached_block_hash_to_block is not noting:
            # a reset makes a new one
            self._map = noting = _NotingMap(self._pool.cached_block_hash_to_block)
            self._pool.cached_block_hash_to_block = noting
            return CacheChanges(True, noting.blocks(), ())
        changed = noting.take_changed()
        if not changed:
            return None
        blocks = {key: noting.get_one_block(key) for key in changed}
        come = {key: block.block_id for key, block in blocks.items() if block is not None}
        return CacheChanges(False, come, tuple(changed - come.keys()))


class _NotingMap(BlockHashToBlockMap):
    """vLLM's map from keys to blocks, which knows the keys whose blocks have changed."""

    def __init__(self, other: BlockHashToBlockMap) -> None:
        super().__init__()
        self._cache = other._cache
        self._changed: set[Any] = set()

    def insert(self, key: Any, block: Any) -> None:
        self._changed.add(key)
        super().insert(key, block)

    def pop(self, key: Any, block_id: int) -> Any:
        self._changed.add(key)
        return super().pop(key, block_id)

    def blocks(self) -> dict[bytes, int]:
        """One block of each key."""
        found = {key: self.get_one_block(key) for key in self._cache}
        return {key: block.block_id for key, block in found.items() if block is not None}

    def take_changed(self) -> set[Any]:
        """Keys that were inserted or taken out since the last call."""
        changed, self._changed = self._changed, set()
        return changed
