# SPDX-License-Identifier: Apache-2.0
"""Per-request state by req_idx: tokens, block tables, cache salt; preempt and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_metal.engine.batch.rows import NewestSlots

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class RequestState:
    """One request while it has a req_idx; a preempted one gets a new state when it resumes.

    Only Requests changes it. `output_token_ids` grows when the host reads tokens, a step or more
    after they were sampled; custom logits processors hold the same list.
    """

    request: NewRequestData  # as first sent by the scheduler, or at this turn of a session
    req_idx: int  # row of every per-request table, from 0 to max_num_reqs - 1
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def req_id(self) -> str:
        return self.request.req_id

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that samples."""
        assert self.request.sampling_params is not None
        return self.request.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cache_salt(self) -> str | None:
        """The request's cache_salt; only requests with equal salts share prefix-cache blocks."""
        return getattr(self.request, "cache_salt", None) or None  # see vllm_patches.scheduler


@dataclass(frozen=True)
class Changes:
    """The changes that a scheduler output made to the requests."""

    left: list[RequestState] = field(default_factory=list)  # gave up their req_idx
    entered: list[RequestState] = field(default_factory=list)  # were given one
    failed: dict[str, Exception] = field(default_factory=dict)  # by request id; they have none


class BlockTables:
    """Block tables of all requests, one table per KV cache group."""

    def __init__(self, num_groups: int, max_num_reqs: int, max_blocks: int) -> None:
        # [G][max_num_reqs, max_blocks] int32
        self.tables_np = [np.zeros((max_num_reqs, max_blocks), np.int32) for _ in range(num_groups)]
        self._lengths = [[0] * max_num_reqs for _ in range(num_groups)]
        self.newest_slots = NewestSlots()

    def replace(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Replaces a request's tables by `block_ids`, one list per group."""
        for lengths in self._lengths:
            lengths[req_idx] = 0
        self.append(req_idx, block_ids)

    def append(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Appends newly allocated blocks to a request's tables."""
        for table, lengths, ids in zip(self.tables_np, self._lengths, block_ids, strict=True):
            start = lengths[req_idx]
            table[req_idx, start : start + len(ids)] = ids
            lengths[req_idx] = start + len(ids)


class Requests:
    """Requests by id, and by req_idx the arrays from which a step's inputs are gathered."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_tables: BlockTables) -> None:
        self.block_tables = block_tables
        # Tokens the host knows; numpy's zeros cost no memory until they are written.
        self.token_ids_np = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_known_np = np.zeros(max_num_reqs, np.int32)  # how many tokens the host has read
        # Known or still on the device: all that a step sampled, until it is known what is kept.
        self.num_tokens_np = np.zeros(max_num_reqs, np.int32)
        # How many the host knew before it learned the outcome of the newest step.
        self.num_known_before_np = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens_np = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, np.int32)
        self._states: dict[str, RequestState] = {}
        self._preempted: dict[str, RequestState] = {}  # their req_idx is free
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __getitem__(self, req_id: str) -> RequestState:
        return self._states[req_id]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_preempted(self) -> int:
        """Number of requests without a req_idx that may resume."""
        return len(self._preempted)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def apply(self, scheduler_output: SchedulerOutput) -> Changes:
        """Updates the requests that the scheduler added, finished, preempted, resumed or advanced.

        If a request raises, only that request fails; it gets no req_idx.

        Returns:
            The requests that gave up their req_idx (finished, preempted, or at the end of a turn),
            that got one (new, resumed, or at their next turn), and that failed. One that entered
            may have the req_idx of one that left.
        """
        changes = Changes()
        gone = [self.remove_request(req_id) for req_id in scheduler_output.finished_req_ids]
        gone += [self.preempt_request(id_) for id_ in scheduler_output.preempted_req_ids or ()]
        changes.left.extend(state for state in gone if state is not None)
        for data in scheduler_output.scheduled_new_reqs:
            self._attempt(changes, data.req_id, self._begin, data)
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            go_on = self._resume if req_id in cached.resumed_req_ids else self._advance
            self._attempt(changes, req_id, go_on, cached, index)
        return changes

    def _attempt(
        self, changes: Changes, req_id: str, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Calls `call` for a request; if it raises, removes the request and records its failure."""
        try:
            call(changes, *arguments)
        except Exception as error:
            changes.failed[req_id] = error
            if (state := self.remove_request(req_id)) is not None:
                changes.left.append(state)

    def _begin(self, changes: Changes, data: NewRequestData) -> None:
        """Adds a new request, one that resumes, or a known session's next turn.

        vLLM sends a session's next turn as a new request of the same id. Its prompt is all that
        came before, less the last token of the turn before.
        """
        if (before := self.remove_request(data.req_id)) is not None:
            changes.left.append(before)
        changes.entered.append(self.add_request(data))

    def _resume(self, changes: Changes, cached: CachedRequestData, index: int) -> None:
        req_id, block_ids = cached.req_ids[index], cached.new_block_ids[index]
        if block_ids is None:  # a resumed request starts from new blocks, where there are any
            assert not self.block_tables.tables_np
            block_ids = ()
        num_computed, tokens = cached.num_computed_tokens[index], cached.all_token_ids[req_id]
        changes.entered.append(self.resume_request(req_id, tokens, block_ids, num_computed))

    def _advance(self, changes: Changes, cached: CachedRequestData, index: int) -> None:
        req_idx = self._states[cached.req_ids[index]].req_idx
        self.num_computed_tokens_np[req_idx] = cached.num_computed_tokens[index]
        if (block_ids := cached.new_block_ids[index]) is not None:
            self.block_tables.append(req_idx, block_ids)
        if cached.new_token_ids:
            self._take_scheduled(cached, index)

    def _take_scheduled(self, cached: CachedRequestData, index: int) -> None:
        """Takes tokens that another pipeline rank sampled; the scheduler sends the uncomputed ones.

        Accepted drafts that this rank has computed are in the token table already.
        """
        state = self._states[cached.req_ids[index]]
        known, computed = int(self.num_known_np[state.req_idx]), cached.num_computed_tokens[index]
        accepted = self.token_ids_np[state.req_idx, known:computed].tolist()
        new = cached.new_token_ids[index][max(known - computed, 0) :]
        if accepted or new:
            self.append_tokens(state, [*accepted, *new])

    def add_request(self, data: NewRequestData) -> RequestState:
        """Adds a new request, or the next turn of a session, when it is first scheduled.

        vLLM's second model runner also expects this for resumed requests: all their tokens are in
        `prefill_token_ids`.
        """
        assert data.prompt_token_ids is not None
        prompt_token_ids = list(data.prompt_token_ids)  # vLLM lengthens its own with each turn
        outputs = list((data.prefill_token_ids or ())[len(prompt_token_ids) :])
        state = RequestState(data, self._free.pop(), prompt_token_ids, outputs)
        self._enter(state, data.block_ids, data.num_computed_tokens)
        return state

    def resume_request(
        self,
        req_id: str,
        all_token_ids: list[int],
        block_ids: Sequence[Sequence[int]],
        num_computed_tokens: int,
    ) -> RequestState:
        """Resumes a preempted request with all of its tokens, which the scheduler sends.

        Makes a new state: if the host reads a token that was sampled before the preemption,
        `append_tokens` drops it, since it comes with the old state.
        """
        old = self._preempted.pop(req_id)
        output_token_ids = all_token_ids[old.num_prompt_tokens :]
        state = RequestState(old.request, self._free.pop(), old.prompt_token_ids, output_token_ids)
        self._enter(state, block_ids, num_computed_tokens)
        return state

    def _enter(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> None:
        req_idx, tokens = state.req_idx, state.prompt_token_ids + state.output_token_ids
        self._states[state.req_id] = state
        self.token_ids_np[req_idx, : len(tokens)] = tokens
        self.num_known_np[req_idx] = self.num_tokens_np[req_idx] = len(tokens)
        self.num_known_before_np[req_idx] = len(tokens)
        self.num_prompt_tokens_np[req_idx] = state.num_prompt_tokens
        self.num_computed_tokens_np[req_idx] = num_computed_tokens
        self.block_tables.replace(req_idx, block_ids)

    def preempt_request(self, req_id: str) -> RequestState | None:
        """Frees a request's req_idx until it resumes; returns None if it has none.

        Other requests may run first, by priority or after a reset of the prefix cache.
        """
        if req_id not in self._states:
            return None
        state = self._preempted[req_id] = self._states.pop(req_id)
        self._free.append(state.req_idx)
        return state

    def remove_request(self, req_id: str) -> RequestState | None:
        """Removes a request; returns None if it has no req_idx (preempted, or never scheduled)."""
        self._preempted.pop(req_id, None)
        state = self._states.pop(req_id, None)
        if state is not None:
            self._free.append(state.req_idx)
        return state

    def note_sampled(self, req_indices_np: np.ndarray, counts_np: np.ndarray | int = 1) -> None:
        """Counts tokens that [N] requests sampled, before the host has read them.

        Args:
            req_indices_np: [N] int32.
            counts_np: [N] int32, one more than the drafts that each verifies.
        """
        self.num_tokens_np[req_indices_np] += counts_np

    def have_unread_np(self, req_indices_np: np.ndarray) -> np.ndarray:
        """[R] bool, requests with tokens that the host has not read yet."""
        unread: np.ndarray = self.num_tokens_np[req_indices_np] > self.num_known_np[req_indices_np]
        return unread

    def note_drafts(self, req_idx: int, token_ids: Sequence[int]) -> None:
        """Writes drafts after a request's known tokens, on ranks that only get accepted counts."""
        known, width = int(self.num_known_np[req_idx]), self.token_ids_np.shape[1]
        self.token_ids_np[req_idx, known : known + len(token_ids)] = token_ids[: width - known]

    def append_tokens(
        self, state: RequestState, token_ids: list[int], num_rejected: int = 0
    ) -> None:
        """Appends sampled tokens that the host has read; ignores a state that is no longer current.

        Args:
            state: the request's state when the tokens were sampled.
            token_ids: accepted tokens.
            num_rejected: rejected drafts, which `note_sampled` has counted.
        """
        if self._states.get(state.req_id) is not state:
            return
        state.output_token_ids.extend(token_ids)
        req_idx = state.req_idx
        known = int(self.num_known_np[req_idx])
        room = self.token_ids_np.shape[1] - known
        self.token_ids_np[req_idx, known : known + len(token_ids)] = token_ids[: max(room, 0)]
        self.num_known_before_np[req_idx] = known
        self.num_known_np[req_idx] = known + len(token_ids)
        num_tokens = self.num_tokens_np[req_idx] - num_rejected
        self.num_tokens_np[req_idx] = max(num_tokens, self.num_known_np[req_idx])

    def roll_back(self) -> None:
        """Reduces the scheduler's counts of computed tokens by rejected drafts.

        The scheduler counts every draft as computed until it has the step's results. A request past
        its prompt has computed all its tokens but the newest. For a step that the host has not read
        either, the counts of computed and of all tokens both include all of its drafts.
        """
        np.minimum(
            self.num_computed_tokens_np, self.num_tokens_np - 1, out=self.num_computed_tokens_np
        )
