# SPDX-License-Identifier: Apache-2.0
"""ScheduledDrafts: drafts that another rank made, for ranks that do not sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.spec_decode.adaptive import DraftLengths
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer
from vllm_metal.engine.spec_decode.speculator import Speculator

if TYPE_CHECKING:
    from vllm_metal.engine.batch.input_batch import StepDrafts
    from vllm_metal.engine.batch.outputs import StepOutput, Unread
    from vllm_metal.engine.batch.requests import Requests


class ScheduledDrafts(Speculator):
    """Takes all drafts, and how many of them were accepted, from the scheduler."""

    def __init__(self, requests: Requests, num_drafts: int, most_drafts: int | None) -> None:
        """For the arguments, see Speculator."""
        lengths = DraftLengths(num_drafts)
        super().__init__(requests, _Nothing(num_drafts), lengths, num_drafts, most_drafts)

    def record(self, outputs: Sequence[StepOutput]) -> None:
        return

    def step_drafts(
        self,
        num_scheduled_tokens: Mapping[str, int],
        reserved: Mapping[str, Sequence[int]],
        unread: Unread | None = None,
    ) -> StepDrafts:
        for req_id, drafts in reserved.items():
            self._requests.note_drafts(self._requests[req_id].req_idx, drafts)
        return super().step_drafts(num_scheduled_tokens, reserved, unread)


class _Nothing(Proposer):
    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def propose(self, request: DraftRequest) -> Drafts:
        count = len(request.req_indices_np)
        return Drafts(mx.zeros((count, self._num_drafts), mx.int32), np.zeros(count, np.int32))
