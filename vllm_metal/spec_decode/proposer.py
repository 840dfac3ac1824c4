# SPDX-License-Identifier: Apache-2.0
"""The interface of proposers: known tokens in, drafts out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import mlx.core as mx
import numpy as np

from vllm_metal.batch.outputs import Unread
from vllm_metal.batch.rows import Rows

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


@dataclass(frozen=True)
class Drafts:
    """Guesses of each request's next tokens."""

    token_ids: mx.array  # [R, K] int32, on the device; past a request's count: arbitrary
    counts_np: np.ndarray  # [R] int32, from 0 to K

    @staticmethod
    def of_lists(guesses: list[list[int]], num_drafts: int) -> Drafts:
        """Drafts of R lists, none longer than `num_drafts`, the K of the result."""
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

    #: Whether the host must know all tokens: `propose` then gets no `unread`.
    reads_text: ClassVar[bool] = True

    @abstractmethod
    def propose(
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
        num_before_np: np.ndarray | None = None,
        unread: Unread | None = None,
    ) -> Drafts:
        """Guesses what follows the newest tokens of a step's R requests.

        Args:
            token_ids_np: [max_num_reqs, max_model_len] int32, by req_idx; read only.
            req_indices_np: [R] rows of the requests.
            num_tokens_np: [R] known tokens of a request that samples in the coming step; where the
                step still works on a prompt, the end of its rows.
            limits_np: [R] most drafts wanted of each, from 0 to K; 0 within a prompt.
            num_before_np: [R] known tokens of each before its newest step sampled; None: all rows
                since lay where the host said.
            unread: what that step sampled and the host does not know; None: it knows all tokens.
        """

    def begin_request(self, req_idx: int, num_computed: int) -> None:  # noqa: B027 - most need not know
        """A request starts or resumes; the prefix cache holds its first `num_computed` tokens."""

    def set_scope(self, req_idx: int, scope: str | None) -> None:  # noqa: B027 - most share nothing
        """Names the tenant whose past outputs the request reads and adds to; before `propose`."""

    def forget_request(self, req_idx: int) -> None:  # noqa: B027 - most keep nothing by req_idx
        """The request is gone; another one may take its row."""

    def complete_draft_kv(  # noqa: B027 - most keep no K/V
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        ends_np: np.ndarray,
        num_before_np: np.ndarray | None = None,
    ) -> None:
        """Writes the K/V of positions before `ends_np`, where `propose` has not done so yet.

        Their blocks are about to be kept for other requests, or other machines.

        Args:
            token_ids_np: see `propose`.
            req_indices_np: [R] rows of the requests.
            ends_np: [R] int32, each below its request's number of known tokens. What no step has
                had rows of is left out.
            num_before_np: see `propose`.
        """

    def take_hidden(self, rows: Rows) -> None:  # noqa: B027 - for heads on hidden states
        """The target's forward of these rows has just been built."""


class TextProposer(Proposer):
    """Guesses from tokens alone: no model, nothing on the device.

    It must be quick: the device is idle while it runs.
    """

    def __init__(self, num_drafts: int) -> None:
        """
        Args:
            num_drafts: num_speculative_tokens, the K of the drafts.
        """
        self._num_drafts = num_drafts

    @classmethod
    @abstractmethod
    def from_config(cls, config: SpeculativeConfig) -> Self:
        """The proposer with the settings of --speculative-config."""

    def propose(
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
        num_before_np: np.ndarray | None = None,
        unread: Unread | None = None,
    ) -> Drafts:
        room = token_ids_np.shape[1] - num_tokens_np  # no draft beyond the longest text
        limits = np.minimum(np.minimum(limits_np, self._num_drafts), room).tolist()
        requests = zip(req_indices_np.tolist(), num_tokens_np.tolist(), limits, strict=True)
        guesses = [
            self._guess(req_idx, token_ids_np[req_idx, :num_tokens], limit)
            for req_idx, num_tokens, limit in requests
        ]
        return Drafts.of_lists(guesses, self._num_drafts)

    @abstractmethod
    def _guess(self, req_idx: int, text: np.ndarray, limit: int) -> list[int]:
        """At most `limit` tokens that may follow a text, int32 [n]; none for a limit < 1."""


class Seen:
    """How many tokens of a growing text are indexed, and whether a text continues them.

    Compares the length and the last few tokens, which shows that another request has taken the row.
    A text that differs only further back passes as the same; that costs wrong drafts, nothing else.
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
