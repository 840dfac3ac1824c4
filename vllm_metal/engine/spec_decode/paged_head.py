# SPDX-License-Identifier: Apache-2.0
"""Draft heads that read the target's hidden states and keep K/V in the shared pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound
from vllm_metal.engine.batch.input_batch import following_ids
from vllm_metal.engine.batch.requests import Requests
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.memory.profile import LargestStep
from vllm_metal.engine.models.loader import ModelLoadError, mlx_dtype
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import HiddenStates
from vllm_metal.engine.spec_decode.draft_writer import DraftWriter, Forward
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.network import DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.paged_proposer import PagedProposer
from vllm_metal.engine.spec_decode.passes import Passes, PassInputs, PassNetwork
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer
from vllm_metal.engine.spec_decode.spans import UNKNOWN, KeptRows, Spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.spec_decode.head_images import HeadImages
    from vllm_metal.engine.vision.column import ImageColumn, StepImages


class HeadNetwork(DraftNetwork):
    """A draft head loaded for its target."""

    def __init__(
        self, config: VllmConfig, head: Head, layers: Sequence[StatefulLayer], states: HiddenStates
    ) -> None:
        """
        Args:
            config: vLLM's.
            head: loaded, with an embedding and an output head.
            layers: the head's layers as the KV cache sees them.
            states: the target's hidden states that the head reads.
        """
        assert config.speculative_config is not None
        self._config = config
        self._head = head
        self.layers = layers
        self._states = states
        self._num_drafts = config.speculative_config.num_speculative_tokens
        self._images: HeadImages | None = None

    def read_images(self, images: ImageColumn) -> None:
        from vllm_metal.engine.spec_decode.head_images import HeadImages

        head, model = self._head, self._config.model_config
        size, (*_, own) = model.get_hidden_size(), head.embed_tokens(mx.zeros(1, mx.int32)).shape
        if own != size:
            assert self._config.speculative_config is not None
            raise ModelLoadError(
                f"--speculative-config model {self._config.speculative_config.model!r} is not "
                f"supported with images: its token embeddings have {own} dimensions, but "
                f"the image embeddings of {model.model!r} have {size}. Choose another head, "
                "or serve text alone: --language-model-only."
            )
        self._images = HeadImages(head, images)

    def profile(self, backend: KVBackend) -> None:
        largest = LargestStep.of(self.layers, self._config, backend)
        rows = largest.rows
        hidden = mx.zeros((len(rows.positions), self._head.input_size), mlx_dtype(self._config))
        hidden = self._head.combine(hidden)
        inputs = PassInputs(rows.input_ids, rows.positions, hidden, rows.logits_indices)
        with largest.caches() as caches:
            drafts, _ = self.passes().next_tokens(inputs, caches)
        mx.eval(drafts)

    def passes(self) -> HeadPasses:
        """Makes what runs the head in passes."""
        return HeadPasses(self._head, self._images)

    def proposer(self, pool: DraftPool) -> Proposer:
        placed = self._paged(pool), pool.block_tables, pool.graphs
        return self.drafting_by(Passes(self.passes(), *placed, self._num_drafts))

    def drafting_by(self, passes: Passes) -> HeadProposer:
        """Makes the proposer, which drafts in these passes over the pool."""
        return HeadProposer(self._head, passes, self._states, self._num_drafts, self._images)

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter:
        network, images = self.passes(), self._images

        def pass_over(rows: Rows, last_token_ids: mx.array) -> tuple[Rows, Forward]:
            states = self._states.take()
            following, embeddings = following_ids(requests, rows, last_token_ids), None
            if images is not None:
                starts_np = rows.positions_np[rows.query_start_loc_np[:-1]]
                spans = Spans(rows.req_indices_np, starts_np, rows.seq_lens_np)
                kept = [kept for _, kept in _kept_of(rows, states, images.newest)]
                # It is not known yet what the step after this one reads.
                embeddings = images.embeddings(following, spans, kept, encode=False)
            hidden = self._head.combine(states)
            inputs = PassInputs(following, rows.positions, hidden, None, embeddings)
            placed = network.placed(inputs, rows)
            rows = rows if placed is inputs else replace(rows, positions=placed.positions)
            return rows, partial(network.hidden, placed)

        paged = self._paged(pool, begins_steps=False)
        last = pool.layer_states[self.layers[-1].name]
        return DraftWriter(paged, last, pool.block_tables, pass_over)

    def _paged(self, pool: DraftPool, begins_steps: bool = True) -> PagedLayers:
        own = {layer.name: pool.layer_states[layer.name] for layer in self.layers}
        block_size = self._config.cache_config.block_size
        return PagedLayers(self.layers, own, pool.group_of, block_size, begins_steps=begins_steps)


class HeadPasses(PassNetwork):
    """A draft head in the form that `Passes` runs; it reads tokens and hidden states."""

    module: Head

    def __init__(self, head: Head, images: HeadImages | None) -> None:
        self.module, self._images = head, images

    def placed(self, inputs: PassInputs, rows: Rows) -> PassInputs:
        return inputs if self._images is None else self._images.placed(inputs, rows)

    def hidden(self, inputs: PassInputs, caches: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """Runs the head over T tokens and returns its two outputs; see Head."""
        assert inputs.hidden is not None
        embeddings = inputs.embeddings
        if embeddings is None:
            embeddings = self.module.embed_tokens(inputs.input_ids)
        if not inputs.extras:
            return self.module(embeddings, inputs.hidden, caches)
        with bound(ForwardInputs(inputs.input_ids, inputs.positions[None], extras=inputs.extras)):
            return self.module(embeddings, inputs.hidden, caches)

    def next_tokens(
        self, inputs: PassInputs, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """The likeliest next tokens, and the head's hidden states; see PassNetwork."""
        out, hidden = self.hidden(inputs, caches)
        if inputs.wanted is not None:
            out, hidden = out[inputs.wanted], hidden[inputs.wanted]
        return self.module.tokens(out), hidden


class HeadProposer(PagedProposer):
    """Drafts first from the target's hidden states, then from the head's own."""

    reads_before = True
    #: Whether the head has K/V to write of all tokens, those of prompts included.
    writes_kv: ClassVar[bool] = True

    def __init__(
        self,
        head: Head,
        passes: Passes,
        states: HiddenStates,
        num_drafts: int,
        images: HeadImages | None = None,
    ) -> None:
        """
        Args:
            head: loaded, with an embedding and an output head.
            passes: run the head over the shared pool.
            states: the target's hidden states.
            num_drafts: K, the most drafts of a request.
            images: the images that the head reads; None if its target reads none.
        """
        super().__init__(passes, num_drafts)
        self._head = head
        self._states = states
        self._images = images
        self._kept: dict[int, KeptRows] = {}  # by req_idx
        self._written: dict[int, int] = {}  # by req_idx, end of what has been run of those

    def begin_request(self, req_idx: int, num_computed: int) -> None:
        self.forget_request(req_idx)

    def forget_request(self, req_idx: int) -> None:
        self._kept.pop(req_idx, None)
        self._written.pop(req_idx, None)

    def take_hidden(self, rows: Rows) -> None:
        images = None if self._images is None else self._images.newest
        for req_idx, kept in _kept_of(rows, self._states.take(), images):
            self._kept[req_idx] = kept
            self._written.pop(req_idx, None)

    def propose(self, request: DraftRequest) -> Drafts:
        return self._propose(request, encode=True)

    def _propose(self, request: DraftRequest, encode: bool) -> Drafts:
        nothing = KeptRows(mx.zeros(0), 0, 0, 0)
        req_indices = request.req_indices_np.tolist()
        kept = [self._kept.get(req_idx, nothing) for req_idx in req_indices]
        starts = np.array([of.start for of in kept], np.int32)
        if request.num_before_np is not None:
            starts = np.where(starts == UNKNOWN, request.num_before_np - 1, starts)
        counts = np.array([of.count for of in kept], np.int32)
        most_tokens = request.most_tokens_np
        # Row i reads token i + 1; the rows of rejected drafts lie behind the newest token.
        ends = np.minimum(starts + counts, most_tokens - 1)
        usable = ends > starts
        limits = request.limits_within(self._num_drafts)
        limits[~usable | (ends < most_tokens - 1)] = 0
        written = np.array([self._written.get(req_idx, 0) for req_idx in req_indices])
        unwritten = (written < ends) & self.writes_kv
        here = np.flatnonzero(usable & ((limits > 0) | unwritten))
        token_ids = mx.zeros((len(req_indices), self._num_drafts), mx.int32)
        if len(here):
            of_here = request.select(here)
            spans = Spans(of_here.req_indices_np, starts[here], ends[here])
            of_spans = [kept[index] for index in here]
            spans, hidden = self._reads(spans, of_spans)
            following = spans.tokens(of_here, ahead=1)
            embeddings = self._embeddings(following, spans, of_spans, encode)
            drafts = self._draft(spans, following, hidden, limits[here], of_here.lag, embeddings)
            token_ids[mx.array(here)] = drafts
            self._written |= zip(spans.req_indices_np.tolist(), spans.ends_np.tolist(), strict=True)
        return Drafts(token_ids, limits)

    def _reads(self, spans: Spans, kept: Sequence[KeptRows]) -> tuple[Spans, mx.array]:
        """Returns the spans of the first pass and their [T, H] hidden states.

        Args:
            spans: tokens of R requests' newest steps.
            kept: hidden states of the same requests, which cover the spans.
        """
        return spans, self._head.combine(rows_of(kept, spans))

    def _embeddings(
        self, following: mx.array, spans: Spans, kept: Sequence[KeptRows], encode: bool
    ) -> mx.array | None:
        """Embeds the tokens that follow the spans of `_reads`; see HeadImages."""
        if self._images is None:
            return None
        return self._images.embeddings(following, spans, kept, encode)

    def complete_draft_kv(self, request: DraftRequest) -> None:
        self._propose(request, encode=False)


def _kept_of(
    rows: Rows, states: mx.array, images: StepImages | None
) -> Iterator[tuple[int, KeptRows]]:
    """Splits a step's [T, W] hidden states by request; yields req_idx and hidden states."""
    firsts_np = rows.query_start_loc_np[:-1]
    counts_np = np.diff(rows.query_start_loc_np)
    columns = rows.req_indices_np, firsts_np, _first_positions(rows), counts_np
    of_each = zip(*(column.tolist() for column in columns), strict=True)
    for req_idx, first_row, start, count in of_each:
        yield req_idx, KeptRows(states, first_row, start, count, images)


def _first_positions(rows: Rows) -> np.ndarray:
    """[R] int32, position of each request's first token; UNKNOWN where only the device knows it."""
    starts_np = rows.positions_np[rows.query_start_loc_np[:-1]]
    if rows.lag is None:
        return starts_np
    return np.where(rows.lag.most_np > 0, np.int32(UNKNOWN), starts_np)


def rows_of(kept: Sequence[KeptRows], spans: Spans) -> mx.array:
    """[T, W] hidden states at the spans' positions, which may come from several steps."""
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
