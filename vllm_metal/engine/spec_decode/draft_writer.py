# SPDX-License-Identifier: Apache-2.0
"""Writes draft K/V on an engine that does not draft, for other engines that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vllm_metal.engine.kv_cache.layer_state import Fenced
from vllm_metal.patches.mlx_patches.seam import AttendingCache

if TYPE_CHECKING:
    from vllm_metal.engine.batch.requests import BlockTables
    from vllm_metal.engine.batch.rows import Rows
    from vllm_metal.engine.kv_cache.layer_state import LayerState
    from vllm_metal.engine.models.paged_layers import PagedLayers
    from vllm_metal.patches.mlx_patches.seam import Scoring

#: A forward of the network, given its caches.
Forward = Callable[[list[Any]], Any]


class DraftWriter:
    """Runs one pass of a draft network over the tokens of each step, within that step.

    Each step's blocks are complete when it ends, so nothing is kept from step to step and nothing
    waits for the device. The pass stops once the last layer's K/V are written: its attention, and
    all that follows, is only needed for drafts.
    """

    def __init__(
        self,
        paged: PagedLayers,
        last: LayerState,
        block_tables: BlockTables,
        pass_over: Callable[[Rows, mx.array], tuple[Rows, Forward] | None],
    ) -> None:
        """
        Args:
            paged: the network's layers, whose forwards join the target's steps.
            last: state of the last layer.
            block_tables: the requests' block tables.
            pass_over: maps the arguments of `write` to the tokens and the forward of a pass; None:
                there is nothing to write.
        """
        self._paged = paged
        self._last = last
        self._block_tables = block_tables
        self._pass_over = pass_over

    def write(self, rows: Rows, last_token_ids: mx.array) -> list[mx.array]:
        """Builds the pass over the tokens of the target's newest forward.

        Args:
            rows: the step's tokens, without drafts.
            last_token_ids: [max_num_reqs] int32, the newest token by req_idx, including those that
                this step samples.

        Returns:
            Arrays that the device is to compute after the target's forward.
        """
        if (found := self._pass_over(rows, last_token_ids)) is None:
            return []
        rows, forward = found
        with self._paged.step(rows, self._block_tables) as caches:
            try:
                forward([*caches[:-1], _LastCache(caches[-1])])
            except _LastWritten as written:
                last = self._last.storage
                return [*written.arrays, *(last.fences if isinstance(last, Fenced) else ())]
        raise RuntimeError("the draft network's last layer has not written its K/V")


class _LastWritten(Exception):
    """Ends the draft network's forward once the last layer's K/V are written."""

    def __init__(self, arrays: list[mx.array]) -> None:
        super().__init__()
        self.arrays = arrays


class _LastCache(AttendingCache):
    """The last layer's cache: writes K/V, then raises _LastWritten."""

    def __init__(self, cache: AttendingCache) -> None:
        self._cache = cache

    @property
    def offset(self) -> mx.array:
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise _LastWritten(list(self._cache.update_and_fetch(keys, values)))

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        raise RuntimeError("K/V were not written before attention")
