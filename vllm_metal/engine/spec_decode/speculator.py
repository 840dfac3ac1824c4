# SPDX-License-Identifier: Apache-2.0
"""Speculator: decides a step's drafts, and when a draft network writes missing K/V."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from vllm.logger import init_logger

from vllm_metal.engine.batch.input_batch import StepDrafts
from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.batch.requests import Requests, RequestState
from vllm_metal.engine.spec_decode.adaptive import DraftLengths
from vllm_metal.engine.spec_decode.prompt_lookup import PromptLookup
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer

if TYPE_CHECKING:
    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.outputs import StepOutput, Unread
    from vllm_metal.engine.batch.rows import Rows


logger = init_logger(__name__)

#: Below this share of accepted drafts even cheap ones rarely pay; judged after so many.
LOW_ACCEPTANCE, MIN_JUDGED = 0.2, 1000


class Speculator(PerRequestState):
    """Takes drafts from a proposer; a `DraftLengths` decides how many are worth verifying.

    With async scheduling the scheduler reserves tokens for K drafts of every request; those that
    get no draft are left out of the batch. The proposer then continues from the newest step's
    samples, which the host usually has not read yet.
    """

    def __init__(
        self,
        requests: Requests,
        proposer: Proposer,
        lengths: DraftLengths,
        num_drafts: int,
        most_drafts: int | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        """
        Args:
            requests: requests to draft for.
            proposer: makes the drafts.
            lengths: limits the drafts of each request.
            num_drafts: K, the most drafts of a request in a step.
            most_drafts: the most drafts of all requests in a step, if memory limits them; None: as
                many as the step has tokens for.
            lookup: finds requests whose drafts are copied from their own text; None: no request's
                drafts are.
        """
        self._requests = requests
        self._proposer = proposer
        self._lengths = lengths
        self.num_drafts = num_drafts
        self._most_drafts = most_drafts
        self._lookup = lookup
        # Requests and drafts of the step laid out last.
        self._laid_out: tuple[list[str], StepDrafts]
        self._last_finish: float | None = None
        self._num_judged = 0  # drafts verified so far

    def for_warm_up(self) -> Speculator:
        """A copy for warm-up steps: drafts as much as possible, and records nothing in this one."""
        lengths = DraftLengths(self.num_drafts)
        return Speculator(
            self._requests, self._proposer, lengths, self.num_drafts, self._most_drafts
        )

    @property
    def reads_text(self) -> bool:
        """Whether the host must have read all tokens before the next step's drafts are made."""
        return self._proposer.reads_text

    def is_copying(self, req_ids: Iterable[str]) -> bool:
        """Whether any of these requests copies its own text: its drafts need all of its tokens.

        Ignores requests without a req_idx.
        """
        if self._lookup is None:
            return False
        requests = self._requests
        here = [requests[req_id].req_idx for req_id in req_ids if req_id in requests]
        indices_np = np.array(here, np.int32)
        known_np = requests.num_known_np[indices_np]
        return self._lookup.update(requests.token_ids_np, indices_np, known_np)

    def record(self, outputs: Sequence[StepOutput]) -> None:
        """Records what steps sampled and accepted; call it once per step, in order.

        Waits for the device if the host has not read the steps' tokens.
        """
        for output in outputs:
            self._record(output)
            if len(outputs) > 1:  # the host has not seen when each of them ended
                self._last_finish = None

    def _record(self, output: StepOutput) -> None:
        output.token_ids()
        batch, now = output.batch, time.perf_counter()
        sampling = batch.sampling_np
        copied = None if batch.drafts is None else batch.drafts.copied_np
        if batch.drafts is not None and len(sampling):
            accepted = output.num_accepted()
            if copied is not None:  # how many copies are accepted says nothing of the proposer
                accepted, sampling = accepted[~copied[sampling]], sampling[~copied[sampling]]
            drafted = batch.drafts.counts_np[sampling]
            self._lengths.observe_drafts(batch.req_indices_np[sampling], drafted, accepted)
            self._warn_if_useless(drafted)
        # Steps with copies wait for the one before: they would make rows look expensive.
        decoding = copied is None and len(sampling) == len(batch.requests) > 0
        if decoding and self._last_finish is not None:
            self._lengths.observe_step(int(batch.query_start_loc_np[-1]), now - self._last_finish)
        self._last_finish = now if decoding else None

    def _warn_if_useless(self, drafted: np.ndarray) -> None:
        if self._num_judged >= MIN_JUDGED:
            return
        self._num_judged += int(drafted.sum())
        if self._num_judged >= MIN_JUDGED and self._lengths.acceptance() < LOW_ACCEPTANCE:
            logger.warning(
                "Only %.0f %% of the drafts are accepted: speculation hardly helps on this "
                "traffic. Try a smaller num_speculative_tokens in --speculative-config, another "
                "method or draft model, or leave it out",
                100 * self._lengths.acceptance(),
            )

    def leave(self, req_idx: int) -> None:
        """Called when a request is gone, so that another one may take its req_idx."""
        self._proposer.forget_request(req_idx)
        self._lengths.forget_request(req_idx)
        if self._lookup is not None:
            self._lookup.forget_request(req_idx)

    def step_drafts(
        self,
        num_scheduled_tokens: Mapping[str, int],
        reserved: Mapping[str, Sequence[int]],
        unread: Unread | None = None,
    ) -> StepDrafts:
        """Makes the drafts that a step verifies.

        Args:
            num_scheduled_tokens: request id to its number of tokens, drafts included.
            reserved: request id to the drafts the scheduler knows of; -1 stands for one that is
                still to be proposed.
            unread: tokens of these requests that the host has not read; None: it knows all.
        """
        req_ids = list(num_scheduled_tokens)
        known = [reserved.get(req_id, ()) for req_id in req_ids]
        room = np.array([len(drafts) for drafts in known], np.int32)
        scheduled = np.fromiter(num_scheduled_tokens.values(), np.int32, len(req_ids))
        limits = room
        if of_text := any(drafts[0] >= 0 for drafts in known if drafts):
            awaiting = np.array([bool(drafts) and drafts[0] < 0 for drafts in known])
            limits = np.where(awaiting, room, 0)
        drafts = self._propose(req_ids, scheduled - room, limits, unread)
        token_ids, counts = drafts.token_ids, drafts.counts_np
        if of_text:
            lists = [[token for token in drafts if token >= 0] for drafts in known]
            from_text = Drafts.of_lists(lists, token_ids.shape[1])
            token_ids = mx.where(mx.array(awaiting)[:, None], token_ids, from_text.token_ids)
            counts = np.where(awaiting, counts, from_text.counts_np)
            counts = _within(counts, self._most_drafts)
        copied = None if unread is not None else self._copied(req_ids)  # see `_copies`
        self._laid_out = (req_ids, StepDrafts(token_ids, counts, room, copied))
        return self._laid_out[1]

    def _copied(self, req_ids: Sequence[str]) -> np.ndarray | None:
        """[R] bool, requests that copy their own text; None if none does."""
        if self._lookup is None or not self._lookup.copying_np.any():
            return None
        copied: np.ndarray = self._lookup.copying_np[
            [self._requests[req_id].req_idx for req_id in req_ids]
        ]
        return copied if copied.any() else None

    def drafts_after(self, batch: InputBatch) -> dict[str, list[int]]:
        """Drafts that follow a step's samples, by request id; waits for the device."""
        here = [state.req_id in self._requests for state in batch.requests]
        req_ids = [state.req_id for state, there in zip(batch.requests, here, strict=True) if there]
        if not req_ids:
            return {}
        sampled = np.zeros(len(batch.requests), bool)
        sampled[batch.sampling_np] = True
        rows = np.diff(batch.query_start_loc_np)
        limits = np.where(sampled, self.num_drafts, 0)[here]
        # A request that sampled continues with one row; one in its prompt has done its rows.
        num_rows = np.where(sampled, 1, rows)[here]
        drafts = self._propose(req_ids, num_rows, limits, unread=None, done=True)
        return _lists(req_ids, drafts.token_ids, drafts.counts_np)

    def laid_out_drafts(self) -> dict[str, list[int]]:
        """Drafts of the step that was laid out last, by request id; waits for the device."""
        req_ids, drafts = self._laid_out
        return _lists(req_ids, drafts.token_ids, drafts.counts_np)

    def complete_draft_kv(self, ends: Mapping[str, int]) -> None:
        """Makes the proposer write the K/V of requests' first tokens that are still missing.

        Args:
            ends: request id to the number of tokens; ignores requests that are gone.
        """
        here = {req_id: end for req_id, end in ends.items() if req_id in self._requests}
        if here:
            requests = self._requests
            indices_np = np.array([requests[req_id].req_idx for req_id in here], np.int32)
            # The newest of so many tokens is left out, see Proposer.
            known_np, ahead = requests.num_known_np[indices_np], self._proposer.lookahead
            tokens_np = np.minimum(np.array([*here.values()]) + ahead, known_np)
            nothing_np = np.zeros(len(here), np.int32)
            self._proposer.complete_draft_kv(self._request(indices_np, tokens_np, nothing_np))

    def complete_draft_blocks(self, req_ids: Iterable[str], block_size: int) -> None:
        """Makes the proposer complete the full blocks of requests that will not draft again.

        A proposer writes a step's K/V in the step after it, so the last step's are still missing
        when the prefix cache keeps its blocks.

        Args:
            req_ids: ignores requests that are gone.
            block_size: tokens of a block.
        """
        requests = self._requests
        here = [req_id for req_id in req_ids if req_id in requests]
        if not here:
            return
        known_np = requests.num_known_np
        ends = {req_id: int(known_np[requests[req_id].req_idx]) - 1 for req_id in here}
        self.complete_draft_kv(
            {req_id: end // block_size * block_size for req_id, end in ends.items()}
        )

    def enter(self, state: RequestState) -> None:
        """Called when a request starts or resumes."""
        num_computed = int(self._requests.num_computed_tokens_np[state.req_idx])
        self._proposer.begin_request(state.req_idx, num_computed)
        self._proposer.set_scope(state.req_idx, state.cache_salt)
        if self._lookup is not None:
            self._lookup.begin_request(state.req_idx, state.num_prompt_tokens)

    def take_hidden(self, rows: Rows) -> None:
        """Called when the target's forward of these tokens has just been built."""
        self._proposer.take_hidden(rows)

    def _propose(
        self,
        req_ids: Sequence[str],
        num_rows: np.ndarray,
        most: np.ndarray,
        unread: Unread | None,
        done: bool = False,
    ) -> Drafts:
        """
        Args:
            req_ids: all R requests of the step.
            num_rows: [R] tokens of each request without drafts.
            most: [R] most drafts of each request.
            unread: tokens of these requests that the host has not read; None: it knows all.
            done: whether the step has already run.
        """
        requests = self._requests
        req_indices = np.array([requests[req_id].req_idx for req_id in req_ids], np.int32)
        known, computed = (
            requests.num_known_np[req_indices],
            requests.num_computed_tokens_np[req_indices],
        )
        drafting = most > 0
        ends = known
        if np.count_nonzero(drafting) < len(drafting):
            ends = np.where(drafting, known, np.minimum(computed + num_rows, known))
        copies = self._copies(req_indices, ends, most, unread)
        limits = np.zeros(len(req_ids), np.int32)
        num_copied = 0
        if copies is not None:
            limits, num_copied = copies.counts_np.copy(), int(copies.counts_np.sum())
            drafting &= limits == 0
        if num_drafting := int(np.count_nonzero(drafting)):
            others = num_copied + int(num_rows.sum()) - num_drafting
            chosen = self._lengths.limits(req_indices[drafting], 0 if done else others)
            limits[drafting] = np.minimum(chosen, most[drafting])
        limits = _within(limits, self._most_drafts)
        if copies is None:
            return self._proposer.propose(self._request(req_indices, ends, limits, unread))
        # The proposer writes the K/V of what is copied, too: later drafts read them.
        guessing = np.where(drafting, limits, 0)
        guesses = self._proposer.propose(self._request(req_indices, ends, guessing, unread))
        token_ids = mx.where(mx.array(drafting)[:, None], guesses.token_ids, copies.token_ids)
        return Drafts(token_ids, np.where(drafting, guesses.counts_np, limits))

    def _copies(
        self, req_indices: np.ndarray, ends: np.ndarray, most: np.ndarray, unread: Unread | None
    ) -> Drafts | None:
        """Drafts of requests that copy; None if there are none. Arguments as in `_propose`."""
        lookup, token_ids_np = self._lookup, self._requests.token_ids_np
        if lookup is None or not lookup.update(token_ids_np, req_indices, ends):
            return None
        if unread is not None:  # found just now: the next step waits, see `is_copying`
            return None
        most = np.minimum(most, token_ids_np.shape[1] - ends)
        return lookup.drafts(token_ids_np, req_indices, ends, most, self.num_drafts)

    def _request(
        self,
        req_indices_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
        unread: Unread | None = None,
    ) -> DraftRequest:
        """Describes [R] requests to the proposer; arguments as in DraftRequest."""
        requests, before_np = self._requests, None
        if self._proposer.reads_before:
            known_np = requests.num_known_np[req_indices_np]
            pending = requests.have_unread_np(req_indices_np)
            before_np = np.where(pending, known_np, requests.num_known_before_np[req_indices_np])
        num_tokens_np = num_tokens_np.astype(np.int32, copy=False)
        return DraftRequest(
            requests.token_ids_np, req_indices_np, num_tokens_np, limits_np, before_np, unread
        )


def _within(counts_np: np.ndarray, most: int | None) -> np.ndarray:
    """Reduces [R] int32 counts of drafts to `most` in total, second drafts before first ones."""
    if most is None or counts_np.sum() <= most:
        return counts_np
    there = np.arange(counts_np.max())[:, None] < counts_np  # [K, R]
    first = there & (np.cumsum(there).reshape(there.shape) <= most)
    return first.sum(0, dtype=np.int32)


def _lists(req_ids: Sequence[str], token_ids: mx.array, counts: np.ndarray) -> dict[str, list[int]]:
    rows = zip(req_ids, np.array(token_ids).tolist(), counts.tolist(), strict=True)
    return {req_id: row[:count] for req_id, row, count in rows}
