# SPDX-License-Identifier: Apache-2.0
"""The interface of proposers, which draft the tokens that follow the known ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.engine.batch.outputs import Unread
from vllm_metal.engine.batch.rows import Rows

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


@dataclass(frozen=True)
class DraftRequest:
    """R requests of a step, after whose newest tokens drafts are wanted."""

    token_ids_np: np.ndarray  # [max_num_reqs, max_model_len] int32, by req_idx; read only
    req_indices_np: np.ndarray  # [R] int32, rows of the requests
    #: [R] int32, known tokens of a request that samples in the coming step; where the step still
    #: works on a prompt, the end of its rows.
    num_tokens_np: np.ndarray
    limits_np: np.ndarray  # [R] int32, most drafts wanted of each, from 0 to K; 0 within a prompt
    #: [R] int32, known tokens of each before its newest step sampled; None: all rows since lay
    #: where the host said, or the proposer does not read it.
    num_before_np: np.ndarray | None = None
    #: Tokens which that step sampled and the host does not know; None: the host knows all tokens.
    unread: Unread | None = None

    @cached_property
    def most_tokens_np(self) -> np.ndarray:
        """[R] int32, tokens of each request if all of its unread ones are accepted."""
        unread = self.unread
        return self.num_tokens_np if unread is None else self.num_tokens_np + unread.counts_np

    @property
    def lag(self) -> PositionLag | None:
        """How far `most_tokens_np` exceeds the accepted tokens; None if it is exact."""
        return None if self.unread is None else self.unread.lag

    def limits_within(self, num_drafts: int, max_len: int | np.ndarray | None = None) -> np.ndarray:
        """[R] int32, each request's wanted drafts, limited by `num_drafts` and `max_len`.

        Args:
            num_drafts: most drafts of a request.
            max_len: most tokens of a request, or [R] of each; None: the length of the token table.
        """
        max_len = self.token_ids_np.shape[1] if max_len is None else max_len
        room_np = max_len - self.most_tokens_np
        limits_np = np.minimum(np.minimum(self.limits_np, room_np), np.int32(num_drafts))
        return np.maximum(limits_np, np.int32(0))

    def select(self, indices_np: np.ndarray) -> DraftRequest:
        """Returns a DraftRequest of only the requests at `indices_np`, [n]."""
        before_np = self.num_before_np
        return DraftRequest(
            self.token_ids_np,
            self.req_indices_np[indices_np],
            self.num_tokens_np[indices_np],
            self.limits_np[indices_np],
            None if before_np is None else before_np[indices_np],
            None if self.unread is None else self.unread.of(indices_np),
        )


@dataclass(frozen=True)
class Drafts:
    """Drafts of each request's next tokens."""

    token_ids: mx.array  # [R, K] int32, on the device; past a request's count: arbitrary
    counts_np: np.ndarray  # [R] int32, from 0 to K

    @staticmethod
    def of_lists(guesses: list[list[int]], num_drafts: int) -> Drafts:
        """Builds drafts from R lists; K is `num_drafts`, which no list exceeds."""
        token_ids = np.zeros((len(guesses), num_drafts), np.int32)
        counts = np.zeros(len(guesses), np.int32)
        for index, guess in enumerate(guesses):
            if guess:
                counts[index] = len(guess)
                token_ids[index, : len(guess)] = guess
        return Drafts(mx.array(token_ids), counts)


class Proposer(ABC):
    """Guesses what the target model will sample next.

    A wrong draft costs time; it never changes what the target samples.
    """

    #: Whether the host must know all tokens: requests then have no `unread`.
    reads_text: ClassVar[bool] = True
    #: Whether `propose` needs `DraftRequest.num_before_np`.
    reads_before: ClassVar[bool] = False
    #: How many tokens after a position its K/V depend on; at least 1.
    lookahead = 1

    @abstractmethod
    def propose(self, request: DraftRequest) -> Drafts:
        """Drafts the tokens that follow the newest ones of a step's R requests."""

    def begin_request(self, req_idx: int, num_computed: int) -> None:  # noqa: B027 - most need not know
        """Called when a request starts or resumes, with its number of prefix-cached tokens."""

    def set_scope(self, req_idx: int, scope: str | None) -> None:  # noqa: B027 - most share nothing
        """Sets, before `propose`, the tenant whose past outputs the request reads and extends."""

    def forget_request(self, req_idx: int) -> None:  # noqa: B027 - most keep nothing by req_idx
        """Called when a request is gone, so that another one may take its req_idx."""

    def complete_draft_kv(self, request: DraftRequest) -> None:  # noqa: B027 - most keep no K/V
        """Writes the K/V that `propose` has not written, of all tokens but each request's newest.

        Called before the tokens' blocks are kept for other requests or sent to other machines.

        Args:
            request: has no wanted drafts and no `unread`. Positions that no step has computed are
                skipped.
        """

    def take_hidden(self, rows: Rows) -> None:  # noqa: B027 - for heads on hidden states
        """Called when the target's forward of these tokens has just been built."""


class TextProposer(Proposer):
    """Drafts from tokens alone, on the host, without a model.

    Implementations must be quick: the device is idle while they run.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    @classmethod
    @abstractmethod
    def from_config(cls, config: SpeculativeConfig) -> Self:
        """Makes the proposer with the settings of --speculative-config."""

    def propose(self, request: DraftRequest) -> Drafts:
        limits_np = request.limits_within(self._num_drafts)
        columns = request.req_indices_np, request.num_tokens_np, limits_np
        guesses = [
            self._guess(req_idx, request.token_ids_np[req_idx, :num_tokens], limit)
            for req_idx, num_tokens, limit in zip(*(each.tolist() for each in columns), strict=True)
        ]
        return Drafts.of_lists(guesses, self._num_drafts)

    @abstractmethod
    def _guess(self, req_idx: int, text: np.ndarray, limit: int) -> list[int]:
        """Drafts at most `limit` tokens that may follow `text`, [n] int32; none for a limit < 1."""


class Seen:
    """Tracks how many tokens of a growing text are indexed, and whether a text continues them.

    Compares only the length and the last few tokens, which detects that another request has taken
    the req_idx. A text that differs further back goes unnoticed; that costs only wrong drafts.
    """

    _NUM_COMPARED = 8

    def __init__(self) -> None:
        self.length = 0  # tokens indexed
        self._tail = b""

    def is_start_of(self, text: np.ndarray) -> bool:
        length = self.length
        compared = text[max(0, length - self._NUM_COMPARED) : length]
        return len(text) >= length and compared.tobytes() == self._tail

    def take(self, text: np.ndarray) -> None:
        self.length = len(text)
        self._tail = text[-self._NUM_COMPARED :].tobytes()
