# SPDX-License-Identifier: Apache-2.0
"""Supplies an encoder with token types, which mark the second text of a pair to be scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.pooling.encoders.networks import TOKEN_TYPES

if TYPE_CHECKING:
    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows

#: vLLM's key in `PoolingParams.extra_kwargs` for where the second text begins and ends in a
#: prompt. Padding that follows is of the first type.
_SECOND_TEXT = "compressed_token_type_ids"
_NOWHERE = np.iinfo(np.int32).max


class TokenTypes(PerRequestState):
    """Stores the range of the second text in each request's prompt."""

    def __init__(self, max_num_reqs: int, num_types: int) -> None:
        """num_types: number of token types that the model can embed."""
        self._num_types = num_types
        self._ranges_np = np.full((max_num_reqs, 2), _NOWHERE, np.int32)

    def enter(self, state: RequestState) -> None:
        params = state.request.pooling_params
        found = (params.extra_kwargs or {}).get(_SECOND_TEXT) if params is not None else None
        if found is None or found[0] >= state.num_prompt_tokens:
            return
        if self._num_types < 2:
            raise ValueError("the request has two token types, but the model has only one")
        self._ranges_np[state.req_idx] = found

    def leave(self, req_idx: int) -> None:
        self._ranges_np[req_idx] = _NOWHERE

    def extras(self, rows: Rows) -> Mapping[str, mx.array]:
        ranges_np = self._ranges_np[rows.req_indices_np]
        if (ranges_np == _NOWHERE).all():
            return {}
        starts_np, ends_np = np.repeat(ranges_np, np.diff(rows.query_start_loc_np), axis=0).T
        positions_np = rows.positions_np
        second_np = (starts_np <= positions_np) & (positions_np < ends_np)
        return {TOKEN_TYPES: mx.array(second_np.astype(np.int32))}
