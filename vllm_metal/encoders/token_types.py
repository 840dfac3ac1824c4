# SPDX-License-Identifier: Apache-2.0
"""TokenTypes: which of a pair's texts each token is of, as requests to score pairs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.batch.columns import RequestColumn
from vllm_metal.encoders.networks import TOKEN_TYPES

if TYPE_CHECKING:
    from vllm_metal.batch.requests import RequestState
    from vllm_metal.batch.rows import Rows

#: vLLM's name for the place of the second text in a prompt, in `PoolingParams.extra_kwargs`.
_SECOND_TEXT = "compressed_token_type_ids"
_NOWHERE = np.iinfo(np.int32).max


class TokenTypes(RequestColumn):
    """Where the second text begins in the prompt of each request."""

    def __init__(self, max_num_reqs: int, num_types: int) -> None:
        """
        Args:
            max_num_reqs: rows of the per-request tables.
            num_types: that the model has embeddings of.
        """
        self._num_types = num_types
        self._starts_np = np.full(max_num_reqs, _NOWHERE, np.int32)

    def enter(self, state: RequestState) -> None:
        params = state.request.pooling_params
        start = (params.extra_kwargs or {}).get(_SECOND_TEXT) if params is not None else None
        if start is None or start >= state.num_prompt_tokens:
            return
        if self._num_types < 2:
            raise ValueError("the request has two token types, but the model has only one")
        self._starts_np[state.req_idx] = start

    def leave(self, req_idx: int) -> None:
        self._starts_np[req_idx] = _NOWHERE

    def extras(self, rows: Rows) -> Mapping[str, mx.array]:
        starts_np = self._starts_np[rows.req_indices_np]
        if (starts_np == _NOWHERE).all():
            return {}
        of_row_np = np.repeat(starts_np, np.diff(rows.query_start_loc_np))
        return {TOKEN_TYPES: mx.array((rows.positions_np >= of_row_np).astype(np.int32))}
