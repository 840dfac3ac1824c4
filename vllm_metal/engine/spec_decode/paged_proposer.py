# SPDX-License-Identifier: Apache-2.0
"""Base class of proposers whose network keeps K/V, in the same blocks as the target's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.engine.spec_decode.passes import Passes, evened, single_rows
from vllm_metal.engine.spec_decode.proposer import Proposer
from vllm_metal.engine.spec_decode.spans import Spans


class PagedProposer(Proposer):
    """Drafts in passes: one over all new tokens of the requests, then passes of one token each.

    The network's K/V share blocks with the target's, so a prefix hit restores both. The speculator
    calls `propose` in every step for all its requests, whether they want drafts or not. The first
    pass reads only sampled tokens and overwrites the K/V of rejected drafts. If the host does not
    know yet which of the newest tokens are accepted, the pass reads all of them, since their
    positions are known; later passes start after the last accepted token, which the device knows,
    and overwrite the K/V beyond it. The blocks have room for all these tokens and the drafts.
    Nothing waits for the device, except over a pool that MLX's scatter writes: there the first
    pass waits, and the others wait once together.
    """

    reads_text = False

    def __init__(self, passes: Passes, num_drafts: int) -> None:
        self._passes = passes
        self._num_drafts = num_drafts

    def _draft(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        limits_np: np.ndarray,
        lag: PositionLag | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """Drafts [R, K] int32 after the spans; arbitrary past a request's limit.

        Args:
            spans: positions of R requests for the first pass; none is empty.
            input_ids: [T] int32, tokens at the spans' positions.
            hidden: [T, ...] hidden states, for networks that read more than tokens.
            limits_np: [R] drafts of each request.
            lag: number of rejected tokens at the end of each span; None: none.
            embeddings: [T, H], replace those of `input_ids` if some are of images.
        """
        exact = lag is None or not lag.most_np.any()
        if exact and len(spans.index_np) == len(limits_np) and limits_np.all():
            return self._together(spans, limits_np, input_ids, hidden, None)
        drafting = np.flatnonzero(limits_np)
        tokens, hidden = self._first(spans, input_ids, hidden, drafting, lag, embeddings)
        drafts = mx.zeros((len(limits_np), self._num_drafts), mx.int32)
        if not len(drafting):
            return drafts
        drafts[mx.array(drafting), 0] = tokens
        going_on = np.flatnonzero(limits_np[drafting] > 1)
        if len(going_on):
            if len(going_on) < len(drafting):
                kept = mx.array(going_on)
                tokens, hidden = tokens[kept], None if hidden is None else hidden[kept]
            drafting = drafting[going_on]
            of_these = None if lag is None else lag.of(drafting)
            ends_np = spans.ends_np[drafting]
            single = Spans(spans.req_indices_np[drafting], ends_np, ends_np + 1)
            more = self._together(single, limits_np[drafting] - 1, tokens, hidden, of_these)
            drafts[mx.array(drafting), 1:] = more[:, :-1]
        return drafts

    def _first(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        drafting: np.ndarray,
        lag: PositionLag | None,
        embeddings: mx.array | None,
    ) -> tuple[mx.array, mx.array | None]:
        """Runs the first pass; returns tokens and hidden states of the requests at `drafting`."""
        even, places_np = evened(spans)
        stored_np = None
        if (places_np < 0).any():
            stored_np, places = places_np >= 0, mx.array(np.maximum(places_np, 0))
            input_ids, hidden = input_ids[places], None if hidden is None else hidden[places]
            embeddings = None if embeddings is None else embeddings[places]
        last_rows = even.query_start_loc_np[1:] - 1
        # A pass without drafts only writes K/V; its one row of logits costs next to nothing.
        wanted = mx.array(last_rows[drafting] if len(drafting) else last_rows[:1])
        if lag is not None and len(drafting):
            wanted = wanted - lag.counts[mx.array(drafting)]
        rows = even.rows(input_ids, wanted, None, stored_np)
        return self._passes.first(rows, hidden, embeddings)

    def _together(
        self,
        spans: Spans,
        limits_np: np.ndarray,
        input_ids: mx.array,
        hidden: mx.array | None,
        lag: PositionLag | None,
    ) -> mx.array:
        """[R, K] int32 drafts, if every span is one token and every request wants drafts."""
        rows = single_rows(spans, limits_np, input_ids, lag)
        drafts = self._passes.together(rows, hidden)
        return mx.pad(drafts, [(0, 0), (0, self._num_drafts - len(rows))])
