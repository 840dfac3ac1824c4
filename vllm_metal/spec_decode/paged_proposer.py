# SPDX-License-Identifier: Apache-2.0
"""Proposers that keep K/V of their own, in the same blocks as the target's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.spec_decode.passes import Passes, further_rows
from vllm_metal.spec_decode.proposer import Proposer
from vllm_metal.spec_decode.spans import Spans


class PagedProposer(Proposer):
    """Drafts in passes: one over a request's new tokens, then passes of one row each, at once.

    The network's K/V share blocks with the target's, so a prefix hit brings both. The speculator
    calls `propose` in every step for all its requests, whether they want drafts or not. The first
    pass reads sampled tokens only, and overwrites the K/V of rejected drafts. Where the host does
    not know which of the newest tokens are kept, it reads them all: their positions are known, and
    what lies past the newest token that is kept is overwritten by later passes. Those start where
    the device knows that token to be. The blocks have room for all these tokens and the limit.
    Nothing here waits for the device, except over a pool that MLX's scatter writes: there for the
    first pass, and once for all others.
    """

    reads_text = False

    def __init__(self, passes: Passes, num_drafts: int) -> None:
        """
        Args:
            passes: of the network.
            num_drafts: K, the most drafts of a request.
        """
        self._passes = passes
        self._num_drafts = num_drafts

    def _draft(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        limits_np: np.ndarray,
        behind: PositionLag | None = None,
    ) -> mx.array:
        """[R, K] int32 drafts that follow the spans; past a request's limit: arbitrary.

        Args:
            spans: of R requests, none empty; the first pass.
            input_ids: [T] int32 of the first pass.
            hidden: [T, ...] of its rows, for networks that take more than tokens.
            limits_np: [R] drafts of each request.
            behind: how many rows at the end of each span are of tokens that are not kept; None:
                all are kept.
        """
        drafting = np.flatnonzero(limits_np)
        last_rows = spans.query_start_loc_np[1:] - 1
        # A pass without drafts only writes K/V; its one row of logits costs next to nothing.
        wanted = mx.array(last_rows[drafting] if len(drafting) else last_rows[:1])
        if behind is not None and len(drafting):
            wanted = wanted - behind.counts[mx.array(drafting)]
        tokens, hidden = self._passes.first(spans.rows(input_ids, wanted), hidden)
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
            of_these = None if behind is None else behind.of(drafting)
            rows = further_rows(spans.of(drafting), limits_np[drafting], tokens, of_these)
            drafts[mx.array(drafting), 1 : len(rows) + 1] = self._passes.further(rows, hidden)
        return drafts
