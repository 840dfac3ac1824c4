# SPDX-License-Identifier: Apache-2.0
"""PromptColumn: bidirectional attention within each request's prompt (prefix LM)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.batch.per_request_state import PerRequestState, RequestsRefused
from vllm_metal.engine.kv_cache.layer_state import Run

if TYPE_CHECKING:
    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows


class PromptColumn(PerRequestState):
    """Makes each prompt a bidirectional run, which must be computed in one step from its start.

    Other tokens attend to those before them (`token_type_ids` of transformers' hrm_text).
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._lengths_np = np.zeros(max_num_reqs, np.int32)  # prompt lengths by req_idx
        self._req_ids = [""] * max_num_reqs

    def enter(self, state: RequestState) -> None:
        self._lengths_np[state.req_idx] = state.num_prompt_tokens
        self._req_ids[state.req_idx] = state.req_id

    def leave(self, req_idx: int) -> None:
        self._lengths_np[req_idx] = 0

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """Adds the runs of prompts; fails requests with only a part of theirs in the step."""
        starts_np = rows.query_start_loc_np[:-1]
        lengths_np = self._lengths_np[rows.req_indices_np]
        begins_np = rows.positions_np[starts_np]
        runs: list[Run] = []
        failed: dict[str, Exception] = {}
        for index in np.flatnonzero(begins_np < lengths_np).tolist():
            first, length = int(starts_np[index]), int(lengths_np[index])
            if begins_np[index] or rows.query_start_loc_np[index + 1] - first < length:
                failed[self._req_ids[int(rows.req_indices_np[index])]] = ValueError(
                    "a prompt of a model with prefix_lm=true must be computed in one step: raise "
                    "--max-num-batched-tokens, and send no prompt in several turns"
                )
            runs.append(Run(first, first + length, 0))
        if failed:
            raise RequestsRefused(failed)
        return replace(inputs, runs=(*inputs.runs, *runs)) if runs else inputs
