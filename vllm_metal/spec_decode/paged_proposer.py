# SPDX-License-Identifier: Apache-2.0
"""Proposers that keep K/V of their own, in the same blocks as the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from metal_kernels.layout import Behind
from vllm_metal.batch.outputs import Unread
from vllm_metal.batch.requests import BlockTables
from vllm_metal.batch.rows import Rows, device_positions
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import LayerState
from vllm_metal.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.models.compiled import Graphs
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.spec_decode.proposer import Proposer

if TYPE_CHECKING:
    from vllm_metal.batch.requests import Requests
    from vllm_metal.spec_decode.draft_writer import DraftWriter

#: Prefix of the layer names under which vLLM allocates a draft network's K/V.
LAYER_PREFIX = "draft."


class DraftNetwork(ABC):
    """A loaded draft network; it makes a proposer once the KV pool is there."""

    layers: Sequence[StatefulLayer]  # its share of the KV cache; may be empty

    @abstractmethod
    def profile(self, kv_cache_type: type[LayerKVCache]) -> None:
        """Runs its largest pass once, so that MLX's peak memory is measured."""

    @abstractmethod
    def proposer(
        self,
        kv_caches: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        block_tables: BlockTables,
        graphs: Graphs,
    ) -> Proposer:
        """The proposer over the pool.

        Args:
            kv_caches: a layer's K/V storage by layer name.
            group_of: KV cache group by layer name.
            block_tables: of the requests, shared with the target.
            graphs: whether forwards may be built by graphs, and where such are counted.
        """

    def writer(
        self,
        kv_caches: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        requests: Requests,
    ) -> DraftWriter:
        """What keeps the network's K/V complete on an engine that drafts nothing.

        Args:
            kv_caches, group_of: see `proposer`.
            requests: whose blocks are written.

        Raises:
            NotImplementedError: the network keeps no K/V.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no K/V")


@dataclass(frozen=True)
class Spans:
    """Positions [starts, ends) of R requests, the rows of a pass."""

    req_indices_np: np.ndarray  # [R] int32
    starts_np: np.ndarray  # [R] int32
    ends_np: np.ndarray  # [R] int32

    @cached_property
    def query_start_loc_np(self) -> np.ndarray:
        """[R + 1] int32, first row of each request."""
        out = np.zeros(len(self.req_indices_np) + 1, np.int32)
        np.cumsum(self.ends_np - self.starts_np, out=out[1:])
        return out

    @cached_property
    def index_np(self) -> np.ndarray:
        """[T] which of the R requests a row belongs to."""
        return np.repeat(np.arange(len(self.req_indices_np)), self.ends_np - self.starts_np)

    @cached_property
    def positions_np(self) -> np.ndarray:
        """[T] int32"""
        rows = np.arange(len(self.index_np), dtype=np.int32)
        return rows - (self.query_start_loc_np[:-1] - self.starts_np)[self.index_np]

    def tokens(
        self,
        token_ids_np: np.ndarray,
        num_tokens_np: np.ndarray,
        unread: Unread | None,
        ahead: int = 0,
    ) -> mx.array:
        """[T] int32, the token of each row; past those that are kept: any of the vocabulary.

        Args:
            token_ids_np: [max_num_reqs, max_model_len] int32, by req_idx; what the host knows.
            num_tokens_np: [R] how many of those.
            unread: what follows them; None: nothing.
            ahead: takes the token so many positions after each row instead.
        """
        index_np, positions_np = self.index_np, self.positions_np + ahead
        last = token_ids_np.shape[1] - 1
        known = mx.array(
            token_ids_np[self.req_indices_np[index_np], np.minimum(positions_np, last)]
        )
        places = positions_np - num_tokens_np[index_np]
        if unread is None or (places < 0).all():
            return known
        sampled = unread.token_ids[mx.array(unread.firsts_np[index_np] + np.maximum(places, 0))]
        return mx.where(mx.array(places < 0), known, sampled)

    def rows(
        self, input_ids: mx.array, logits_indices: mx.array | None, behind: Behind | None = None
    ) -> Rows:
        """
        Args:
            input_ids: [T] int32.
            logits_indices: [N] int32, rows to compute logits of; None: all.
            behind: how far before these positions the requests are; None: they are exact.
        """
        return Rows(
            req_indices_np=self.req_indices_np,
            query_start_loc_np=self.query_start_loc_np,
            seq_lens_np=self.ends_np,
            positions_np=self.positions_np,
            positions=device_positions(self.positions_np, self.index_np, behind),
            input_ids=input_ids,
            logits_indices=logits_indices,
            behind=behind,
        )


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
        behind: Behind | None = None,
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
