# SPDX-License-Identifier: Apache-2.0
"""What a proposer of drafts gives, and what one that only reads tokens is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


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


class TextProposer(ABC):
    """Guesses from tokens alone: no model, nothing on the device.

    A guess costs time when it is wrong and never changes what is sampled, so a proposer may be
    as rough as it likes, but it must be quick: the device waits for it.
    """

    @abstractmethod
    def propose(
        self,
        token_ids_np: np.ndarray,
        slots_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
    ) -> Drafts:
        """Guesses what follows the known tokens of R requests.

        Args:
            token_ids_np: [max_num_reqs, max_model_len] int32, by slot; read only.
            slots_np: [R] rows of the requests.
            num_tokens_np: [R] known tokens of each: its prompt and all it has generated.
            limits_np: [R] most drafts wanted of each, from 0 to K.
        """

    def forget(self, slot: int) -> None:  # noqa: B027 - most keep nothing by slot
        """The slot's request is gone: what follows under this slot is another text."""
