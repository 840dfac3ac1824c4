# SPDX-License-Identifier: Apache-2.0
"""AdapterColumn: the adapter of each request, and its tokens' slots in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.lora.adapters import Adapters
from vllm_metal.engine.lora.versions import of_content

if TYPE_CHECKING:
    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows


class AdapterColumn(PerRequestState):
    """Maps req_idx to the digest of the request's adapter."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._digests: dict[int, str] = {}  # the requests' adapters, by req_idx

    def enter(self, state: RequestState) -> None:
        """Loads the adapter if needed; raises what Adapters.load does."""
        self.leave(state.req_idx)
        if state.request.lora_request is None:
            return
        version = of_content(state.request.lora_request)
        self._adapters.load(version)
        self._digests[state.req_idx] = version.digest
        self._adapters.in_use = frozenset(self._digests.values())

    def leave(self, req_idx: int) -> None:
        if self._digests.pop(req_idx, None) is not None:
            self._adapters.in_use = frozenset(self._digests.values())

    def extras(self, rows: Rows) -> Mapping[str, mx.array]:
        """Returns [T] uint32 slots; empty for the plain forward, if no token has an adapter."""
        if not self._digests:
            return {}
        digests = [self._digests.get(req_idx) for req_idx in rows.req_indices_np.tolist()]
        needed = {digest for digest in digests if digest is not None}
        if not needed:
            return {}
        slots = self._adapters.activate(needed)
        by_request = [0 if digest is None else slots[digest] for digest in digests]
        counts = np.diff(rows.query_start_loc_np)
        by_row = np.repeat(np.array(by_request, np.uint32), counts)
        return {self._adapters.updates.extra: mx.array(by_row)}
