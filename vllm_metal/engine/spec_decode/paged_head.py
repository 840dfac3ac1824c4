# SPDX-License-Identifier: Apache-2.0
"""Draft heads that read the target's hidden states and keep K/V in the shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch.input_batch import following_ids
from vllm_metal.engine.batch.requests import Requests
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.memory.profile import LargestStep
from vllm_metal.engine.models.loader import mlx_dtype
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import HiddenStates
from vllm_metal.engine.spec_decode.draft_writer import DraftWriter, Forward
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.network import DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.paged_proposer import PagedProposer
from vllm_metal.engine.spec_decode.passes import Passes, PassInputs, PassNetwork
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer
from vllm_metal.engine.spec_decode.spans import Spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: Position of the first row of a step that was laid out before the host knew it.
_UNKNOWN = -1


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

    def profile(self, backend: KVBackend) -> None:
        largest = LargestStep.of(self.layers, self._config, backend)
        rows = largest.rows
        hidden = mx.zeros((len(rows.positions), self._head.input_size), mlx_dtype(self._config))
        with largest.caches() as caches:
            out, _ = self._head(rows.input_ids, self._head.combine(hidden), caches)
        mx.eval(self._head.tokens(out[rows.logits_indices]))

    def proposer(self, pool: DraftPool) -> Proposer:
        network, paged = HeadPasses(self._head), self._paged(pool)
        passes = Passes(network, paged, pool.block_tables, pool.graphs, self._num_drafts)
        return HeadProposer(self._head, passes, self._states, self._num_drafts)

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter:
        def pass_over(rows: Rows, last_token_ids: mx.array) -> tuple[Rows, Forward]:
            hidden = self._head.combine(self._states.take())
            following = following_ids(requests, rows, last_token_ids)
            return rows, lambda caches: self._head(following, hidden, caches)

        paged = self._paged(pool, begins_steps=False)
        last = pool.layer_states[self.layers[-1].name]
        return DraftWriter(paged, last, pool.block_tables, pass_over)

    def _paged(self, pool: DraftPool, begins_steps: bool = True) -> PagedLayers:
        own = {layer.name: pool.layer_states[layer.name] for layer in self.layers}
        block_size = self._config.cache_config.block_size
        return PagedLayers(self.layers, own, pool.group_of, block_size, begins_steps=begins_steps)


@dataclass(frozen=True)
class _Kept:
    """Hidden states of a request's rows in its newest step."""

    states: mx.array  # [T, W] of the whole step
    first_row: int
    start: int  # position of the first row; _UNKNOWN: the row before what the step sampled
    count: int


class HeadPasses(PassNetwork):
    """What a head predicts."""

    module: Head

    def __init__(self, head: Head) -> None:
        """
        Args:
            head: with its ends in place.
        """
        self.module = head

    def next_tokens(self, inputs: PassInputs, caches: list[Any]) -> tuple[mx.array, mx.array]:
        """The likeliest tokens, and the head's hidden states; see PassNetwork."""
        assert inputs.hidden is not None
        out, hidden = self.module(inputs.input_ids, inputs.hidden, caches)
        if inputs.wanted is not None:
            out, hidden = out[inputs.wanted], hidden[inputs.wanted]
        return self.module.tokens(out), hidden


class HeadProposer(PagedProposer):
    """Reads the target's hidden states for the first draft, the head's own for those after."""

    def __init__(
        self,
        head: Head,
        passes: Passes,
        states: HiddenStates,
        num_drafts: int,
    ) -> None:
        """
        Args:
            head: with its ends in place.
            passes: of it, over the shared pool.
            states: the target's.
            num_drafts: K, the most drafts of a request.
        """
        super().__init__(passes, num_drafts)
        self._head = head
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

    def propose(self, request: DraftRequest) -> Drafts:
        nothing = _Kept(mx.zeros(0), 0, 0, 0)
        req_indices = request.req_indices_np.tolist()
        kept = [self._kept.get(req_idx, nothing) for req_idx in req_indices]
        starts = np.array([of.start for of in kept], np.int32)
        if request.num_before_np is not None:
            starts = np.where(starts == _UNKNOWN, request.num_before_np - 1, starts)
        counts = np.array([of.count for of in kept], np.int32)
        most_tokens = request.most_tokens_np
        # Row i reads token i + 1; the rows of rejected drafts lie behind the newest token.
        ends = np.minimum(starts + counts, most_tokens - 1)
        usable = ends > starts
        limits = request.limits_within(self._num_drafts)
        limits[~usable | (ends < most_tokens - 1)] = 0
        written = np.array([self._written.get(req_idx, 0) for req_idx in req_indices])
        here = np.flatnonzero(usable & ((limits > 0) | (written < ends)))
        token_ids = mx.zeros((len(req_indices), self._num_drafts), mx.int32)
        if len(here):
            of_here = request.select(here)
            spans = Spans(of_here.req_indices_np, starts[here], ends[here])
            following = spans.tokens(of_here, ahead=1)
            hidden = self._head.combine(_rows_of([kept[index] for index in here], spans))
            drafts = self._draft(spans, following, hidden, limits[here], of_here.lag)
            token_ids[mx.array(here)] = drafts
            self._written |= zip(spans.req_indices_np.tolist(), spans.ends_np.tolist(), strict=True)
        return Drafts(token_ids, limits)

    def complete_draft_kv(self, request: DraftRequest) -> None:
        self.propose(request)


def _first_positions(rows: Rows) -> np.ndarray:
    """[R] int32, position of each request's first row; _UNKNOWN where only the device knows it."""
    starts_np = rows.positions_np[rows.query_start_loc_np[:-1]]
    if rows.lag is None:
        return starts_np
    return np.where(rows.lag.most_np > 0, np.int32(_UNKNOWN), starts_np)


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
