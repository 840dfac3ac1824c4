# SPDX-License-Identifier: Apache-2.0
"""Writes a draft network's K/V for other engines to draft from; nothing is drafted here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vllm_metal.batch.input_batch import following_ids
from vllm_metal.kv_cache.layer_state import Fenced
from vllm_metal.mlx_patches.seam import AttendingCache
from vllm_metal.spec_decode.spans import Spans

if TYPE_CHECKING:
    from vllm_metal.batch.requests import Requests
    from vllm_metal.batch.rows import Rows
    from vllm_metal.kv_cache.layer_state import LayerState
    from vllm_metal.mlx_patches.seam import Scoring
    from vllm_metal.models.paged_layers import PagedLayers
    from vllm_metal.models.parts import HiddenStates, ModelParts
    from vllm_metal.spec_decode.head import Head


class DraftWriter(ABC):
    """One pass of a draft network over the rows of each step, in that step.

    No block lacks anything once its step has ended. So nothing is remembered from step to step, and
    nothing here waits for the device. The pass ends where the last layer has its K/V: what that
    layer would attend to, and all behind it, serves drafts only.
    """

    def __init__(self, paged: PagedLayers, last: LayerState, requests: Requests) -> None:
        """
        Args:
            paged: the network's layers, whose forwards join the target's steps.
            last: what the last of them keeps.
            requests: whose blocks are written.
        """
        self._paged = paged
        self._last = last
        self._requests = requests

    @abstractmethod
    def write(self, rows: Rows, last_token_ids: mx.array) -> list[mx.array]:
        """Builds the pass over the rows that the target's forward was built of last.

        Args:
            rows: of the step; without drafts.
            last_token_ids: [max_num_reqs] int32, by req_idx the newest token: of a request that
                samples in this step, what it samples.

        Returns:
            What the device is to compute after the target's forward.
        """

    def _run(self, rows: Rows, forward: Callable[[list[Any]], Any]) -> list[mx.array]:
        """
        Args:
            rows: of the pass.
            forward: of the network, given its caches.
        """
        with self._paged.step(rows, self._requests.block_tables) as caches:
            try:
                forward([*caches[:-1], _LastCache(caches[-1])])
            except _LastWritten as written:
                last = self._last.storage
                return [*written.arrays, *(last.fences if isinstance(last, Fenced) else ())]
        raise RuntimeError("the draft network's last layer has not written its K/V")


class DraftModelWriter(DraftWriter):
    """A draft model reads what the target reads."""

    def __init__(
        self,
        parts: ModelParts,
        paged: PagedLayers,
        last: LayerState,
        requests: Requests,
        max_len: int,
    ) -> None:
        """
        Args:
            parts: of the draft model.
            paged, last, requests: see DraftWriter.
            max_len: tokens the model is made for; it does not run beyond.
        """
        super().__init__(paged, last, requests)
        self._parts = parts
        self._max_len = max_len

    def write(self, rows: Rows, last_token_ids: mx.array) -> list[mx.array]:
        if (rows.seq_lens_np > self._max_len).any():
            within_np = np.flatnonzero(rows.positions_np < self._max_len).astype(np.int32)
            if not len(within_np):
                return []
            starts_np = rows.positions_np[rows.query_start_loc_np[:-1]]
            ends_np = np.minimum(rows.seq_lens_np, self._max_len)
            here = ends_np > starts_np
            spans = Spans(rows.req_indices_np[here], starts_np[here], ends_np[here])
            rows = spans.rows(rows.input_ids[mx.array(within_np)], None)
        return self._run(rows, lambda caches: self._parts.forward_hidden(rows.inputs, caches))


class HeadWriter(DraftWriter):
    """A head reads the target's hidden states, and of each row the token that follows it."""

    def __init__(
        self,
        head: Head,
        states: HiddenStates,
        paged: PagedLayers,
        last: LayerState,
        requests: Requests,
    ) -> None:
        """
        Args:
            head: with its ends in place.
            states: the target's.
            paged, last, requests: see DraftWriter.
        """
        super().__init__(paged, last, requests)
        self._head = head
        self._states = states

    def write(self, rows: Rows, last_token_ids: mx.array) -> list[mx.array]:
        hidden = self._head.combine(self._states.take())
        following = following_ids(self._requests, rows, last_token_ids)
        return self._run(rows, lambda caches: self._head(following, hidden, caches))


class _LastWritten(Exception):
    """Ends a forward."""

    def __init__(self, arrays: list[mx.array]) -> None:
        super().__init__()
        self.arrays = arrays


class _LastCache(AttendingCache):
    """The last layer's: it takes K/V, and ends the forward."""

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
