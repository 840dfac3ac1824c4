# SPDX-License-Identifier: Apache-2.0
"""Per-request state by req_idx: tokens, block tables, cache salt; preempt and resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class RequestState:
    """One request while it has a req_idx; a preempted one gets a new state when it resumes.

    Owner: Requests. `output_token_ids` grows as the host learns tokens, a step or more after they
    were sampled; custom logits processors hold the same list.
    """

    request: NewRequestData  # as the scheduler sent it first, or at this turn of a session
    req_idx: int  # row of every per-request table, from 0 to max_num_reqs - 1
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def req_id(self) -> str:
        return self.request.req_id

    @property
    def sampling_params(self) -> SamplingParams:
        """What a request that samples asks for."""
        assert self.request.sampling_params is not None
        return self.request.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cache_salt(self) -> str | None:
        """The request's cache_salt. Requests of one salt may share cached text; None is a salt."""
        return getattr(self.request, "cache_salt", None) or None  # see vllm_patches.scheduler


@dataclass(frozen=True)
class Changes:
    """What a step's news did to the requests."""

    left: list[RequestState] = field(default_factory=list)  # gave up their req_idx
    entered: list[RequestState] = field(default_factory=list)  # were given one
    failed: dict[str, Exception] = field(default_factory=dict)  # by request id; they have none


class BlockTables:
    """The pool's blocks of every request, one table a KV cache group."""

    def __init__(self, num_groups: int, max_num_reqs: int, max_blocks: int) -> None:
        # [G][max_num_reqs, max_blocks] int32
        self.tables_np = [np.zeros((max_num_reqs, max_blocks), np.int32) for _ in range(num_groups)]
        self._lengths = [[0] * max_num_reqs for _ in range(num_groups)]

    def replace(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Makes `block_ids`, one list a group, the whole of a request's tables."""
        for lengths in self._lengths:
            lengths[req_idx] = 0
        self.append(req_idx, block_ids)

    def append(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Adds newly allocated blocks at the end of a request's tables."""
        for table, lengths, ids in zip(self.tables_np, self._lengths, block_ids, strict=True):
            start = lengths[req_idx]
            table[req_idx, start : start + len(ids)] = ids
            lengths[req_idx] = start + len(ids)


class Requests:
    """Requests by id, and by req_idx the columns that a step's inputs are gathered from."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_tables: BlockTables) -> None:
        self.block_tables = block_tables
        # Tokens the host knows; numpy's zeros cost no memory until they are written.
        self.token_ids_np = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_known_np = np.zeros(max_num_reqs, np.int32)  # how many of those
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
        """Requests without a req_idx, which may get one again."""
        return len(self._preempted)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def apply(self, scheduler_output: SchedulerOutput) -> Changes:
        """Takes the scheduler's word of which requests came, went, resumed or got on.

        A request that raises here fails by itself: it keeps no req_idx, and all others are taken.

        Returns:
            The requests that gave up their req_idx: finished, preempted, or ended their turn of a
            session; those that were given one: new, resumed, or with the next turn; and those that
            failed. One that entered may have the req_idx of one that left.
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
        """Makes the call; where it raises, the request is forgotten, and fails."""
        try:
            call(changes, *arguments)
        except Exception as error:
            changes.failed[req_id] = error
            if (state := self.remove_request(req_id)) is not None:
                changes.left.append(state)

    def _begin(self, changes: Changes, data: NewRequestData) -> None:
        """Takes in a new request, one that resumes, or the next turn of one that is known.

        vLLM sends the next turn of a session as a new request of the same id. Its prompt is all
        that came before, less the last token of the turn before.
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
        """Notes how far a running request is, and its new blocks."""
        req_idx = self._states[cached.req_ids[index]].req_idx
        self.num_computed_tokens_np[req_idx] = cached.num_computed_tokens[index]
        if (block_ids := cached.new_block_ids[index]) is not None:
            self.block_tables.append(req_idx, block_ids)
        if cached.new_token_ids:
            self._take_scheduled(cached, index)

    def _take_scheduled(self, cached: CachedRequestData, index: int) -> None:
        """Takes tokens that another rank has sampled: the scheduler sends what follows those that
        are computed where several ranks have a part of the model.

        Those that were computed as drafts, and kept, are in the table already.
        """
        state = self._states[cached.req_ids[index]]
        known, computed = int(self.num_known_np[state.req_idx]), cached.num_computed_tokens[index]
        kept = self.token_ids_np[state.req_idx, known:computed].tolist()
        news = cached.new_token_ids[index][max(known - computed, 0) :]
        if kept or news:
            self.learn(state, [*kept, *news])

    def add_request(self, data: NewRequestData) -> RequestState:
        """Takes in a request at its first scheduling, or at the first of a session's turn.

        By the contract of vLLM's second model runner also one that resumes: all its tokens are its
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
        """Starts a preempted request again, with the tokens that the scheduler has of it.

        The state is a new one. A token that was sampled before the preemption may reach the host
        after it; `learn` drops it, for it comes with the old state.
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
        """Frees a request's req_idx until it resumes; None if it has none.

        Other requests may run before it does, by priority or after a reset of the prefix cache.
        """
        if req_id not in self._states:
            return None
        state = self._preempted[req_id] = self._states.pop(req_id)
        self._free.append(state.req_idx)
        return state

    def remove_request(self, req_id: str) -> RequestState | None:
        """Forgets a request; None if it has no req_idx: preempted, or never scheduled."""
        self._preempted.pop(req_id, None)
        state = self._states.pop(req_id, None)
        if state is not None:
            self._free.append(state.req_idx)
        return state

    def note_sampled(self, req_indices_np: np.ndarray, counts_np: np.ndarray | int = 1) -> None:
        """Counts sampled tokens of each of [N] requests; the host need not know them yet.

        Args:
            req_indices_np: [N] int32.
            counts_np: [N] int32, one more than the drafts that each verifies.
        """
        self.num_tokens_np[req_indices_np] += counts_np

    def note_drafts(self, req_idx: int, token_ids: Sequence[int]) -> None:
        """Writes a request's drafts behind its known tokens, for a rank that will hear of those
        that are kept by their number alone."""
        known, width = int(self.num_known_np[req_idx]), self.token_ids_np.shape[1]
        self.token_ids_np[req_idx, known : known + len(token_ids)] = token_ids[: width - known]

    def learn(self, state: RequestState, token_ids: list[int], num_rejected: int = 0) -> None:
        """Takes sampled tokens that reached the host; drops those of a state that is gone.

        Args:
            state: of the request.
            token_ids: that are kept.
            num_rejected: how many more were counted when they were sampled.
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
        """Takes back what the scheduler counts as computed but verification rejected.

        The scheduler counts every draft of a step whose outcome it has not seen. A request past
        its prompt has computed all its tokens but the newest; of a step whose outcome the host
        has not seen either, both count all drafts that were laid out.
        """
        np.minimum(
            self.num_computed_tokens_np, self.num_tokens_np - 1, out=self.num_computed_tokens_np
        )
