# SPDX-License-Identifier: Apache-2.0
"""Spans: the positions that a draft network's pass computes, and their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag, RaggedRows
from vllm_metal.engine.batch.rows import Rows, device_positions
from vllm_metal.engine.spec_decode.proposer import DraftRequest

if TYPE_CHECKING:
    from vllm_metal.engine.vision.column import StepImages

#: Position of the first row of a step that was laid out before the host knew it.
UNKNOWN = -1


@dataclass(frozen=True)
class Spans:
    """Positions [starts, ends) of R requests: the T tokens of a pass."""

    req_indices_np: np.ndarray  # [R] int32
    starts_np: np.ndarray  # [R] int32
    ends_np: np.ndarray  # [R] int32
    of_requests: RaggedRows = field(init=False)  # the tokens as rows of the R requests

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_requests", RaggedRows.of(self.ends_np - self.starts_np))

    @property
    def query_start_loc_np(self) -> np.ndarray:
        """[R + 1] int32, index of each request's first token in the pass, and T."""
        return self.of_requests.starts_np

    @property
    def index_np(self) -> np.ndarray:
        """[T] int32, which of the R requests each token belongs to."""
        return self.of_requests.groups_np

    @cached_property
    def positions_np(self) -> np.ndarray:
        """[T] int32, position of each token in its request."""
        return self.starts_np[self.index_np] + self.of_requests.offsets_np

    def tokens(self, request: DraftRequest, ahead: int = 0) -> mx.array:
        """[T] int32, the token at each position; arbitrary valid ids past the accepted tokens.

        Args:
            request: the same R requests.
            ahead: offset added to each position.
        """
        token_ids_np, unread = request.token_ids_np, request.unread
        index_np, positions_np = self.index_np, self.positions_np + ahead
        last = token_ids_np.shape[1] - 1
        known = mx.array(
            token_ids_np[self.req_indices_np[index_np], np.minimum(positions_np, last)]
        )
        places = positions_np - request.num_tokens_np[index_np]
        if unread is None or (places < 0).all():
            return known
        sampled = unread.token_ids[mx.array(unread.firsts_np[index_np] + np.maximum(places, 0))]
        return mx.where(mx.array(places < 0), known, sampled)

    def rows(
        self,
        input_ids: mx.array,
        logits_indices: mx.array | None,
        lag: PositionLag | None = None,
        stored_np: np.ndarray | None = None,
    ) -> Rows:
        """Returns the pass's tokens as a ragged batch.

        Args:
            input_ids: [T] int32.
            logits_indices: [N] int32, tokens to compute logits for; None: all.
            lag: how far the spans' positions exceed the requests' true ones; None: they are exact.
            stored_np: [T] bool, tokens whose K/V are stored; None: all.
        """
        return Rows(
            req_indices_np=self.req_indices_np,
            query_start_loc_np=self.query_start_loc_np,
            seq_lens_np=self.ends_np,
            positions_np=self.positions_np,
            positions=device_positions(self.positions_np, self.of_requests, lag),
            input_ids=input_ids,
            logits_indices=logits_indices,
            lag=lag,
            stored_np=stored_np,
        )


@dataclass(frozen=True)
class KeptRows:
    """Hidden states of a request's tokens in its newest step, for a draft head to read."""

    states: mx.array  # [T, W] of the whole step
    first_row: int
    start: int  # position of the first row; UNKNOWN: the row before what the step sampled
    count: int
    images: StepImages | None = None  # of the whole step
