# SPDX-License-Identifier: Apache-2.0
"""Tracks which blocks vLLM's prefix cache gains and loses, without vLLM's cache events."""

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
    """One step's changes to a prefix cache; picklable.

    A key is the hash of the text up to a block's end plus the block's KV cache group.
    """

    is_all: bool  # the cache was reset: it has no blocks but `added`
    added: Mapping[bytes, int]  # key to block id; the blocks are full once the step is computed
    removed: tuple[bytes, ...]  # keys of blocks that the step may write to


class CachedBlocks:
    """The blocks in a pool's prefix cache, and their changes."""

    # vLLM's own cache events carry the tokens of each block, and leave the engine's process.
    def __init__(self, pool: BlockPool) -> None:
        """Replaces the pool's map on the first `take` by one that records changes."""
        self._pool: Any = pool
        self._map: _RecordingMap | None = None  # None: the first `take` returns the whole cache

    def take(self) -> CacheChanges | None:
        """Returns the changes since the last call, or None if there are none."""
        recording = self._map
        if recording is None or self._pool.cached_block_hash_to_block is not recording:
            # a reset replaces the pool's map
            self._map = recording = _RecordingMap(self._pool.cached_block_hash_to_block)
            self._pool.cached_block_hash_to_block = recording
            return CacheChanges(True, recording.blocks(), ())
        changed = recording.take_changed()
        if not changed:
            return None
        blocks = {key: recording.get_one_block(key) for key in changed}
        added = {key: block.block_id for key, block in blocks.items() if block is not None}
        return CacheChanges(False, added, tuple(changed - added.keys()))


class _RecordingMap(BlockHashToBlockMap):
    """vLLM's map from keys to blocks, which records the keys with changed blocks."""

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
        found = {key: self.get_one_block(key) for key in self._cache}
        return {key: block.block_id for key, block in found.items() if block is not None}

    def take_changed(self) -> set[Any]:
        changed, self._changed = self._changed, set()
        return changed
