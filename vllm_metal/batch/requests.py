# SPDX-License-Identifier: Apache-2.0
"""What persists between steps: the requests, their tokens and their block tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData

    from vllm_metal.sample import Logprobs


_SALT = "vllm_metal_cache_salt"  # key among a request's extra arguments


def remember_salt(params: SamplingParams, salt: str | None) -> None:
    """Puts a request's cache_salt where the worker sees it; vLLM itself does not send it along."""
    others = {key: value for key, value in (params.extra_args or {}).items() if key != _SALT}
    params.extra_args = others | ({_SALT: salt} if salt else {}) or None


@dataclass
class RequestState:
    """One request from its first scheduling to its end; a preempted one is made anew on resume.

    Owner: Requests. `output_token_ids` grows as the host learns tokens, a step or more after they
    were sampled; custom logits processors hold the same list.
    """

    req_id: str
    req_idx: int  # row of every per-request table, from 0 to max_num_reqs - 1
    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    prompt_logprobs: list[Logprobs] | None  # of the chunks so far; None: not wanted, or delivered

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cache_salt(self) -> str | None:
        """Whose texts the request may share speed with; None: everybody's who gave none."""
        return (self.sampling_params.extra_args or {}).get(_SALT)


class BlockTables:
    """Pool blocks of every request, one table a KV cache group."""

    def __init__(self, num_groups: int, max_num_reqs: int, max_blocks: int) -> None:
        # [G][max_num_reqs, max_blocks] int32
        self.tables_np = [np.zeros((max_num_reqs, max_blocks), np.int32) for _ in range(num_groups)]
        self._lengths = [[0] * max_num_reqs for _ in range(num_groups)]

    def replace(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Makes `block_ids`, one list a group, the whole of the req_idx's tables."""
        for lengths in self._lengths:
            lengths[req_idx] = 0
        self.append(req_idx, block_ids)

    def append(self, req_idx: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Adds newly allocated blocks at the end of the req_idx's tables."""
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
        self.num_tokens_np = np.zeros(max_num_reqs, np.int32)  # known or still on the device
        self.num_prompt_tokens_np = np.zeros(max_num_reqs, np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, np.int32)
        self._states: dict[str, RequestState] = {}
        self._preempted: dict[str, RequestState] = {}  # whose req_indices are others' to take
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __getitem__(self, req_id: str) -> RequestState:
        return self._states[req_id]

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add_request(self, data: NewRequestData) -> RequestState:
        """Takes in a request at its first scheduling."""
        assert data.prompt_token_ids is not None and data.sampling_params is not None
        state = RequestState(
            data.req_id,
            self._free.pop(),
            data.sampling_params,
            list(data.prompt_token_ids),
            output_token_ids=[],
            prompt_logprobs=None if data.sampling_params.prompt_logprobs is None else [],
        )
        self._enter(state, data.block_ids, data.num_computed_tokens)
        return state

    def resume_request(
        self,
        req_id: str,
        all_token_ids: list[int],
        block_ids: Sequence[Sequence[int]],
        num_computed_tokens: int,
    ) -> RequestState:
        """Starts a preempted request again from the scheduler's word of its tokens.

        The state is new, so that a token of a step from before the preemption, learnt late,
        goes nowhere.
        """
        old = self._preempted.pop(req_id)
        output_token_ids = all_token_ids[old.num_prompt_tokens :]
        # The scheduler has them if it has the first token; a step that it dropped is repeated.
        missing = old.sampling_params.prompt_logprobs is not None and not output_token_ids
        state = RequestState(
            req_id,
            self._free.pop(),
            old.sampling_params,
            old.prompt_token_ids,
            output_token_ids=output_token_ids,
            prompt_logprobs=[] if missing else None,
        )
        self._enter(state, block_ids, num_computed_tokens)
        return state

    def _enter(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> None:
        req_idx, tokens = state.req_idx, state.prompt_token_ids + state.output_token_ids
        self._states[state.req_id] = state
        self.token_ids_np[req_idx, : len(tokens)] = tokens
        self.num_known_np[req_idx] = self.num_tokens_np[req_idx] = len(tokens)
        self.num_prompt_tokens_np[req_idx] = state.num_prompt_tokens
        self.num_computed_tokens_np[req_idx] = num_computed_tokens
        self.block_tables.replace(req_idx, block_ids)

    def advance(self, data: CachedRequestData, index: int) -> None:
        """Takes the scheduler's news of a running request: its progress and new blocks."""
        req_idx = self._states[data.req_ids[index]].req_idx
        self.num_computed_tokens_np[req_idx] = data.num_computed_tokens[index]
        if (block_ids := data.new_block_ids[index]) is not None:
            self.block_tables.append(req_idx, block_ids)

    def preempt_request(self, req_id: str) -> RequestState | None:
        """Takes a request's req_idx from it until it resumes, for with priorities or after a reset
        others may run before it does; None if it has none."""
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

    def learn(self, state: RequestState, token_ids: list[int]) -> None:
        """Takes sampled tokens that have reached the host, unless their request is gone or anew."""
        if self._states.get(state.req_id) is not state:
            return
        state.output_token_ids.extend(token_ids)
        req_idx = state.req_idx
        known = int(self.num_known_np[req_idx])
        room = self.token_ids_np.shape[1] - known
        self.token_ids_np[req_idx, known : known + len(token_ids)] = token_ids[: max(room, 0)]
        self.num_known_np[req_idx] = known + len(token_ids)
        self.num_tokens_np[req_idx] = max(self.num_tokens_np[req_idx], self.num_known_np[req_idx])

    def roll_back(self) -> None:
        """Forgets what the scheduler counts as computed but verification rejected.

        It counts every draft of a step whose outcome it has not seen. Here that is known, so a
        request past its prompt has computed all its tokens but the newest.
        """
        np.minimum(
            self.num_computed_tokens_np, self.num_tokens_np - 1, out=self.num_computed_tokens_np
        )
