# SPDX-License-Identifier: Apache-2.0
"""Lays out the rows that verify a request's drafts, and decides which drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from metal_kernels.layout import RaggedRows


@dataclass(frozen=True)
class DraftSpans:
    """Rows that verify drafts, one span per request; row k of a span follows its first k drafts.

    Raises ValueError if a span has no row, or there are not as many drafts as rows.
    """

    rows: RaggedRows  # of the R requests: one more than the drafts of each
    #: int32 [N], the draft for the token that each row samples; -1 on a span's last row. A draft
    #: outside the vocabulary is legal and never accepted.
    draft_ids: mx.array

    def __post_init__(self) -> None:
        if self.rows.shortest < 1:
            raise ValueError("draft_spans need at least one row each")
        if self.draft_ids.shape != (self.num_rows,):
            raise ValueError(
                f"draft_ids has shape {self.draft_ids.shape}; draft_spans: {self.num_rows} rows"
            )

    @property
    def num_rows(self) -> int:
        """N, rows of all spans."""
        return len(self.rows.groups_np)

    @property
    def lens_np(self) -> np.ndarray:
        """int32 [R], rows of each span."""
        return self.rows.lens_np

    @property
    def starts_np(self) -> np.ndarray:
        """int32 [R], first row of each span."""
        return self.rows.starts_np[:-1]

    @property
    def offsets_np(self) -> np.ndarray:
        """int32 [N], the number of drafts before each row."""
        return self.rows.offsets_np

    @property
    def index_np(self) -> np.ndarray:
        """int32 [N], the span of each row."""
        return self.rows.groups_np

    @cached_property
    def earlier_np(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [P] twice: every pair of a row and an earlier row in the same span."""
        offsets = self.offsets_np
        rows = np.arange(len(offsets), dtype=np.int32)
        later = np.repeat(rows, offsets)
        return later, np.repeat(rows - offsets, offsets) + RaggedRows.of(offsets).offsets_np

    def part(self, first: int, last: int) -> DraftSpans:
        """Returns spans [first, last), with rows numbered from 0."""
        starts, lens = self.starts_np[first:last], self.lens_np[first:last]
        start, stop = int(starts[0]), int(starts[-1] + lens[-1])
        return DraftSpans(RaggedRows.of(lens), self.draft_ids[start:stop])

    def is_output(self, accepted: mx.array) -> mx.array:  # accepted: int32 [R], drafts of each span
        """Returns bool [N], whether a row's token is output: all drafts before it are accepted."""
        return self.rows.offsets <= accepted[self.rows.groups]


def num_accepted(token_ids: mx.array, draft_spans: DraftSpans) -> mx.array:
    """Returns lazy int32 [R], the number of leading drafts per span equal to sampled tokens."""
    # A span outputs that many drafts and then the token of the row after them. Every row draws from
    # the target's distribution as it would without drafts. A draft is accepted when it is the token
    # drawn, so accepting has probability p(draft), and a rejected draft leaves p without it,
    # renormalized: the law of speculative sampling for a proposal that puts all mass on one token
    # (Leviathan et al. 2023, arXiv:2211.17192, section 2.3). Nothing has to be drawn a second time,
    # and a seeded request gets the tokens it gets without drafts.
    right = token_ids == draft_spans.draft_ids
    if (length := draft_spans.rows.even_length) is not None:
        offsets = mx.where(right, length - 1, draft_spans.rows.offsets)
        return offsets.reshape(-1, length).min(axis=-1)
    last = draft_spans.lens_np[:, None] - 1
    offsets = np.minimum(np.arange(draft_spans.lens_np.max(initial=1), dtype=np.int32), last)
    rows = mx.array(draft_spans.starts_np[:, None] + offsets)
    # Correct rows count as the span's last offset, so min() finds the first mismatch.
    return mx.where(right[rows], mx.array(last), mx.array(offsets)).min(axis=-1)
