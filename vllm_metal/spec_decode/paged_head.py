# SPDX-License-Identifier: Apache-2.0
"""Draft heads that read the target's hidden states and keep K/V in the shared pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from vllm_metal.batch.outputs import Unread
from vllm_metal.batch.requests import BlockTables, Requests
from vllm_metal.batch.rows import Rows
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import LayerState
from vllm_metal.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.memory.profile import LargestStep
from vllm_metal.mlx_patches.seam import AttendingCache
from vllm_metal.models.compiled import Graphs
from vllm_metal.models.loader import mlx_dtype
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.models.parts import HiddenStates
from vllm_metal.spec_decode.draft_writer import DraftWriter, HeadWriter
from vllm_metal.spec_decode.paged_proposer import DraftNetwork, PagedProposer, Spans
from vllm_metal.spec_decode.proposer import Drafts, Proposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: Position of the first row of a step that was laid out before the host knew it.
_UNKNOWN = -1


class Head(Protocol):
    """Works on rows: row i takes the hidden state of position i and the token of position i + 1,
    keeps K/V at position i, and predicts the token of position i + 2."""

    input_size: int  # of the target's hidden states

    def combine(self, hidden: mx.array) -> mx.array:
        """The target's hidden states, [T, input_size], as the head takes them, [T, H]."""

    def __call__(
        self, input_ids: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        """
        Args:
            input_ids: [T] int32.
            hidden: [T, H], combined or from the head itself.
            caches: one a layer, for the rows of this pass.

        Returns:
            [T, H] for `tokens`, and [T, H] for the pass after the next token.
        """

    def tokens(self, out: mx.array) -> mx.array:
        """[N] int32, the likeliest token of each of [N, H], as the target numbers it."""


class HeadNetwork(DraftNetwork):
    """A head loaded for its target."""

    def __init__(
        self, config: VllmConfig, head: Head, layers: Sequence[StatefulLayer], states: HiddenStates
    ) -> None:
        """
        Args:
            config: vLLM's.
            head: with its ends in place.
            layers: its share of the KV cache.
            states: the target's, those that the head reads.
        """
        assert config.speculative_config is not None
        self._config = config
        self._head = head
        self.layers = layers
        self._states = states
        self._num_drafts = config.speculative_config.num_speculative_tokens

    def profile(self, kv_cache_type: type[LayerKVCache]) -> None:
        largest = LargestStep.of(self.layers, self._config, kv_cache_type)
        rows = largest.rows
        hidden = mx.zeros((len(rows.positions), self._head.input_size), mlx_dtype(self._config))
        with largest.caches() as caches:
            out, _ = self._head(rows.input_ids, self._head.combine(hidden), caches)
        mx.eval(self._head.tokens(out[rows.logits_indices]))

    def proposer(
        self,
        kv_caches: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        block_tables: BlockTables,
        graphs: Graphs,
    ) -> Proposer:
        paged = self._paged(kv_caches, group_of)
        return HeadProposer(self._head, paged, block_tables, self._states, self._num_drafts)

    def writer(
        self,
        kv_caches: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        requests: Requests,
    ) -> DraftWriter:
        paged = self._paged(kv_caches, group_of, begins_steps=False)
        last = kv_caches[self.layers[-1].name]
        return HeadWriter(self._head, self._states, paged, last, requests)

    def _paged(
        self,
        kv_caches: Mapping[str, LayerState],
        group_of: Mapping[str, int],
        begins_steps: bool = True,
    ) -> PagedLayers:
        own = {layer.name: kv_caches[layer.name] for layer in self.layers}
        block_size = self._config.cache_config.block_size
        return PagedLayers(self.layers, own, group_of, block_size, begins_steps=begins_steps)


@dataclass(frozen=True)
class _Kept:
    """Hidden states of a request's rows in its newest step."""

    states: mx.array  # [T, W] of the whole step
    first_row: int
    start: int  # position of the first row; _UNKNOWN: the row before what the step sampled
    count: int


class HeadProposer(PagedProposer):
    """Reads the target's hidden states for the first draft, the head's own for those after."""

    def __init__(
        self,
        head: Head,
        paged: PagedLayers,
        block_tables: BlockTables,
        states: HiddenStates,
        num_drafts: int,
    ) -> None:
        """
        Args:
            head: with its ends in place.
            paged: its layers, over the shared pool.
            block_tables: the requests' blocks.
            states: the target's.
            num_drafts: K, the most drafts of a request.
        """
        super().__init__(paged, num_drafts)
        self._head = head
        self._block_tables = block_tables
        self._states = states
        self._kept: dict[int, _Kept] = {}  # by req_idx
        self._written: dict[int, int] = {}  # by req_idx, end of what has been run of those

    def begin_request(self, req_idx: int, num_computed: int) -> None:
        self.forget_request(req_idx)

    def forget_request(self, req_idx: int) -> None:
        self._kept.pop(req_idx, None)
        self._written.pop(req_idx, None)

    def take_hidden(self, rows: Rows) -> None:
        states = self._states.take()
        firsts, counts = rows.query_start_loc_np[:-1], np.diff(rows.query_start_loc_np)
        starts = _first_positions(rows)
        for req_idx, *of_request in zip(
            rows.req_indices_np.tolist(),
            firsts.tolist(),
            starts.tolist(),
            counts.tolist(),
            strict=True,
        ):
            self._kept[req_idx] = _Kept(states, *of_request)
            self._written.pop(req_idx, None)

    def propose(
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
        num_before_np: np.ndarray | None = None,
        unread: Unread | None = None,
    ) -> Drafts:
        nothing = _Kept(mx.zeros(0), 0, 0, 0)
        kept = [self._kept.get(req_idx, nothing) for req_idx in req_indices_np.tolist()]
        starts = np.array([of.start for of in kept], np.int32)
        if num_before_np is not None:
            starts = np.where(starts == _UNKNOWN, num_before_np - 1, starts)
        counts = np.array([of.count for of in kept], np.int32)
        most_tokens = num_tokens_np if unread is None else num_tokens_np + unread.counts_np
        # Row i reads token i + 1; the rows of rejected drafts lie behind the newest token.
        ends = np.minimum(starts + counts, most_tokens - 1)
        usable = ends > starts
        most = np.minimum(token_ids_np.shape[1] - most_tokens, self._num_drafts)
        limits = np.maximum(np.minimum(limits_np, most), 0).astype(np.int32)
        limits[~usable | (ends < most_tokens - 1)] = 0
        written = np.array([self._written.get(req_idx, 0) for req_idx in req_indices_np.tolist()])
        here = np.flatnonzero(usable & ((limits > 0) | (written < ends)))
        token_ids = mx.zeros((len(req_indices_np), self._num_drafts), mx.int32)
        if len(here):
            spans = Spans(req_indices_np[here], starts[here], ends[here])
            of_here = None if unread is None else unread.of(here)
            following = spans.tokens(token_ids_np, num_tokens_np[here], of_here, ahead=1)
            hidden = self._head.combine(_rows_of([kept[index] for index in here], spans))
            behind = None if of_here is None else of_here.behind
            drafts = self._draft(spans, following, hidden, limits[here], behind)
            token_ids[mx.array(here)] = drafts
            self._written |= zip(spans.req_indices_np.tolist(), spans.ends_np.tolist(), strict=True)
        return Drafts(token_ids, limits)

    def settle(
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        ends_np: np.ndarray,
        num_before_np: np.ndarray | None = None,
    ) -> None:
        nothing_np = np.zeros(len(req_indices_np), np.int32)
        # Row i reads token i + 1, so K/V of so many positions take one token more.
        self.propose(token_ids_np, req_indices_np, ends_np + 1, nothing_np, num_before_np)

    def _pass(self, rows: Rows, hidden: mx.array | None) -> tuple[mx.array, mx.array | None]:
        assert hidden is not None
        with self._paged.step(rows, self._block_tables) as caches:
            out, hidden = self._head(rows.input_ids, hidden, caches)
        if rows.logits_indices is not None:
            out, hidden = out[rows.logits_indices], hidden[rows.logits_indices]
        return self._head.tokens(out), hidden


def _first_positions(rows: Rows) -> np.ndarray:
    """[R] int32, position of each request's first row; _UNKNOWN where only the device knows it."""
    starts_np = rows.positions_np[rows.query_start_loc_np[:-1]]
    if rows.behind is None:
        return starts_np
    return np.where(rows.behind.most_np > 0, np.int32(_UNKNOWN), starts_np)


def _rows_of(kept: list[_Kept], spans: Spans) -> mx.array:
    """[T, W] hidden states of the spans' rows, which may come from several steps."""
    sources: dict[int, mx.array] = {}
    bases: dict[int, int] = {}
    for of in kept:
        if id(of.states) not in sources:
            bases[id(of.states)] = sum(len(states) for states in sources.values())
            sources[id(of.states)] = of.states
    firsts = np.array([bases[id(of.states)] + of.first_row for of in kept], np.int32)
    rows = firsts[spans.index_np] + spans.positions_np - spans.starts_np[spans.index_np]
    states = list(sources.values())
    joined = states[0] if len(states) == 1 else mx.concatenate(states)
    return joined[mx.array(rows.astype(np.int32))]
