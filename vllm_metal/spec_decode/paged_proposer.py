# SPDX-License-Identifier: Apache-2.0
"""Proposers that keep K/V of their own, in the same blocks as the target's."""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.batch.rows import Rows
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.spec_decode.proposer import Proposer
from vllm_metal.spec_decode.spans import Spans


class PagedProposer(Proposer):
    """Drafts in passes: one over a request's new tokens, then passes of one row each.

    The network's K/V share blocks with the target's, so a prefix hit brings both. The speculator
    calls `propose` in every step for all its requests, whether they want drafts or not. The first
    pass reads sampled tokens only, and overwrites the K/V of rejected drafts. Where the host does
    not know which of the newest tokens are kept, it reads them all: their positions are known, and
    what lies past the newest token that is kept is overwritten by later passes. Those start where
    the device knows that token to be. The blocks have room for all these tokens and the limit.
    Nothing here waits for the device, except over a pool that MLX's scatter writes.
    """

    reads_text = False

    def __init__(self, paged: PagedLayers, num_drafts: int) -> None:
        """
        Args:
            paged: the network's layers.
            num_drafts: K, the most drafts of a request.
        """
        self._paged = paged
        self._num_drafts = num_drafts

    @abstractmethod
    def _pass(self, rows: Rows, hidden: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """The likeliest next token of N rows, and what the pass after it needs of them.

        Args:
            rows: T rows, logits wanted of N.
            hidden: [T, ...] of each row, for networks that take more than tokens.

        Returns:
            [N] int32 tokens, [N, ...] hidden.
        """

    def _draft(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        limits_np: np.ndarray,
        behind: PositionLag | None = None,
    ) -> mx.array:
        """[R, K] int32 drafts that follow the spans; past a request's limit: zero.

        Args:
            spans: of R requests, none empty; the first pass.
            input_ids: [T] int32 of the first pass.
            hidden: [T, ...], see `_pass`.
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
        tokens, hidden = self._run(spans.rows(input_ids, wanted), hidden)
        columns = []
        for number in range(self._num_drafts):
            column = mx.zeros(len(limits_np), mx.int32)
            if len(drafting):
                column[mx.array(drafting)] = tokens
            columns.append(column)
            going_on = np.flatnonzero(limits_np[drafting] > number + 1)
            if 0 < len(going_on) < len(drafting):
                kept = mx.array(going_on)
                tokens, hidden = tokens[kept], None if hidden is None else hidden[kept]
            drafting = drafting[going_on]
            if len(drafting):
                positions = spans.ends_np[drafting] + number
                single = Spans(spans.req_indices_np[drafting], positions, positions + 1)
                shift = None if behind is None else behind.of(drafting)
                tokens, hidden = self._run(single.rows(tokens, None, shift), hidden)
        return mx.stack(columns, axis=1)

    def _run(self, rows: Rows, hidden: mx.array | None) -> tuple[mx.array, mx.array | None]:
        tokens, hidden = self._pass(rows, hidden)
        arrays = [tokens] if hidden is None else [tokens, hidden]
        if self._paged.pipelined:
            mx.async_eval(arrays)  # the device works while the host lays out what follows
        else:
            mx.eval(arrays)  # scatter writes when all reads are done, see kv_cache.scatter
        return tokens, hidden
