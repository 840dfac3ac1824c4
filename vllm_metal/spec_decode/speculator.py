# SPDX-License-Identifier: Apache-2.0
"""Drafts of every request: who proposes them, how many, and how they fared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.requests import Requests
from vllm_metal.spec_decode.drafts import StepDrafts

if TYPE_CHECKING:
    from vllm_metal.inputs import InputBatch
    from vllm_metal.outputs import StepOutput
    from vllm_metal.spec_decode.adaptive import Lengths
    from vllm_metal.spec_decode.proposer import TextProposer


class Speculator:
    """Stands between the proposer and the steps that verify.

    Before a step is laid out the host has learnt the tokens of the one before, so drafts follow
    from the newest token whether the scheduler plans ahead or not. Where it plans ahead it reserves
    rows for K drafts of every request; rows that get none are left out.
    """

    def __init__(
        self, requests: Requests, proposer: TextProposer, lengths: Lengths, num_drafts: int
    ) -> None:
        """
        Args:
            requests: whose tokens drafts continue.
            proposer: makes the drafts.
            lengths: says how many of them are worth verifying.
            num_drafts: K, the most of a request in a step.
        """
        self._requests = requests
        self._proposer = proposer
        self._lengths = lengths
        self._num_drafts = num_drafts
        self._laid_out: dict[str, list[int]] = {}  # by request, the drafts of the newest step
        self._learnt: StepOutput | None = None
        self._last_finish: float | None = None

    def learn(self, output: StepOutput) -> None:
        """Takes the outcome of the newest step; waits for the device."""
        if output is self._learnt:
            return
        self._learnt = output
        output.token_ids()
        batch, now = output.batch, time.perf_counter()
        sampling = batch.sampling_np
        slots = batch.slots_np[sampling]
        if batch.drafts is not None and len(sampling):
            self._lengths.observe(slots, batch.drafts.counts_np[sampling], output.num_accepted())
        decoding = len(sampling) == len(batch.states) and len(sampling) > 0
        if decoding and self._last_finish is not None:
            self._lengths.observe_step(int(batch.query_start_loc_np[-1]), now - self._last_finish)
        self._last_finish = now if decoding else None

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        self._proposer.forget(slot)
        self._lengths.forget(slot)

    def step_drafts(
        self, num_scheduled_tokens: Mapping[str, int], reserved: Mapping[str, Sequence[int]]
    ) -> StepDrafts:
        """The drafts that a step verifies.

        Args:
            num_scheduled_tokens: request id to its number of rows, those for drafts included.
            reserved: request id to the drafts the scheduler knows of; -1 stands for one that is
                still to be proposed.
        """
        req_ids = list(num_scheduled_tokens)
        room = np.array([len(reserved.get(req_id, ())) for req_id in req_ids], np.int32)
        width = max(self._num_drafts, 1)
        token_ids, counts = np.zeros((len(req_ids), width), np.int32), np.zeros_like(room)
        awaiting = np.zeros(len(req_ids), bool)
        for index in np.flatnonzero(room):
            known = reserved[req_ids[index]]
            awaiting[index] = known[0] < 0
            if not awaiting[index]:
                drafts = [token for token in known if token >= 0]
                token_ids[index, : len(drafts)], counts[index] = drafts, len(drafts)
        rows = np.flatnonzero(awaiting)
        if len(rows):
            others = int(sum(num_scheduled_tokens.values())) - int(room[rows].sum()) - len(rows)
            proposed = self._propose([req_ids[row] for row in rows], others, room[rows])
            for row, drafts in zip(rows, proposed, strict=True):
                token_ids[row, : len(drafts)], counts[row] = drafts, len(drafts)
        self._laid_out = {
            req_id: token_ids[index, : counts[index]].tolist()
            for index, req_id in enumerate(req_ids)
            if room[index]
        }
        return StepDrafts(mx.array(token_ids), counts, room)

    def propose(self, batch: InputBatch) -> dict[str, list[int]]:
        """Drafts that follow what a step sampled, by request id."""
        req_ids = [batch.states[index].req_id for index in batch.sampling_np]
        here = [req_id for req_id in req_ids if req_id in self._requests]
        limits = np.full(len(here), self._num_drafts, np.int32)
        return dict(zip(here, self._propose(here, 0, limits), strict=True))

    @property
    def laid_out(self) -> dict[str, list[int]]:
        """The drafts of the step laid out last, by request id."""
        return self._laid_out

    def _propose(
        self, req_ids: Sequence[str], num_other_rows: int, most: np.ndarray
    ) -> list[list[int]]:
        if not req_ids:
            return []
        slots = np.array([self._requests[req_id].slot for req_id in req_ids], np.int32)
        limits = np.minimum(self._lengths.limits(slots, num_other_rows), most)
        drafts = self._proposer.propose(
            self._requests.token_ids_np, slots, self._requests.num_known_np[slots], limits
        )
        rows = np.array(drafts.token_ids).tolist()
        return [row[:count] for row, count in zip(rows, drafts.counts_np.tolist(), strict=True)]
