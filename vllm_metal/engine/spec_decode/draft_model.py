# SPDX-License-Identifier: Apache-2.0
"""Drafts by a smaller model that shares the target's vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from vllm_metal.engine.attention.compressed_layer import RowLayer
from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.requests import Requests
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import LayerState, Restorable
from vllm_metal.engine.memory.profile import profile_step
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode.draft_writer import DraftWriter, Forward
from vllm_metal.engine.spec_decode.network import LAYER_PREFIX, DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.paged_proposer import PagedProposer
from vllm_metal.engine.spec_decode.passes import Passes, PassInputs, PassNetwork
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer
from vllm_metal.engine.spec_decode.spans import Spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.vision.column import ImageColumn

#: New tokens a request may gather without a pass while nobody wants drafts, so that one pass takes
#: in many steps' tokens. With so few rows it takes little longer than with a single one.
MAX_BEHIND = 16


class DraftModel(DraftNetwork):
    """A draft model: any model that this plugin serves, loaded beside the target."""

    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        """Loads the draft model.

        Args:
            config: vLLM's; its speculative_config names the model.
            target: unused, since a draft model reads only tokens.

        Raises:
            loader.ModelLoadError: the model cannot be loaded, or has another vocabulary.
            NotImplementedError: this plugin does not serve its layers.
        """
        speculation = config.speculative_config
        assert speculation is not None
        self._config = config
        self._name = speculation.model
        self._num_drafts = speculation.num_speculative_tokens
        self._max_len = speculation.draft_model_config.max_model_len
        loader.check_draft_vocabulary(config)
        model = loader.load(config, speculation.draft_model_config)
        family = str(speculation.draft_model_config.hf_config.model_type)
        self.layers = [
            replace(layer, name=LAYER_PREFIX + layer.name)
            for layer in attention_layers(model, family)
        ]
        if any(isinstance(layer, IndexLayer | RowLayer) for layer in self.layers):
            raise NotImplementedError(
                f"a draft model with sparse attention (model_type {family!r}) is not supported. "
                "Choose another draft model"
            )
        self._parts = ModelParts(model)
        self._images: ImageColumn | None = None

    def read_images(self, images: ImageColumn) -> None:
        self._images = images  # only to stop before them

    def profile(self, backend: KVBackend) -> None:
        profile_step(self._parts, self.layers, self._config, backend)

    def proposer(self, pool: DraftPool) -> Proposer:
        placed = self._own(pool), pool.group_of, self._config.cache_config.block_size
        paged = PagedLayers(self.layers, *placed)
        placed_in = paged, pool.block_tables, pool.graphs
        passes = Passes(GreedyModel(self._parts), *placed_in, self._num_drafts)
        max_num_reqs = self._config.scheduler_config.max_num_seqs
        lengths = self._num_drafts, self._max_len
        return DraftModelProposer(passes, max_num_reqs, *lengths, self._images)

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter:
        own, block_size = self._own(pool), self._config.cache_config.block_size
        paged = PagedLayers(self.layers, own, pool.group_of, block_size, begins_steps=False)

        def pass_over(rows: Rows, _: mx.array) -> tuple[Rows, Forward] | None:
            max_lens_np = _max_lens(rows.req_indices_np, self._max_len, self._images)
            inside = _within(rows, max_lens_np)
            if inside is None:
                return None
            return inside, lambda caches: self._parts.forward_hidden(inside.inputs, caches)

        last = own[self.layers[-1].name]
        return DraftWriter(paged, last, pool.block_tables, pass_over)

    def _own(self, pool: DraftPool) -> dict[str, LayerState]:
        own = {layer.name: pool.layer_states[layer.name] for layer in self.layers}
        if any(isinstance(state, Restorable) for state in own.values()):
            raise NotImplementedError(
                f"--speculative-config model {self._name!r} is not supported as a draft model: "
                "rejected drafts would change the state of its recurrent layers. Choose "
                "another model"
            )
        return own


def _max_lens(req_indices_np: np.ndarray, max_len: int, images: ImageColumn | None) -> np.ndarray:
    """[R] int32, tokens of each request that the draft model reads: up to the first image."""
    if images is None or not images.any_requests:
        return np.full(len(req_indices_np), max_len, np.int32)
    return np.minimum(images.first_indices(req_indices_np), max_len)


def _within(rows: Rows, max_lens_np: np.ndarray) -> Rows | None:
    """The tokens of a pass at positions below their request's `max_lens_np`, [R]; None if none."""
    if (rows.seq_lens_np <= max_lens_np).all():
        return rows
    firsts_np = rows.query_start_loc_np
    of_rows_np = np.repeat(max_lens_np, np.diff(firsts_np))
    within_np = np.flatnonzero(rows.positions_np < of_rows_np).astype(np.int32)
    if not len(within_np):
        return None
    starts_np = rows.positions_np[firsts_np[:-1]]
    ends_np = np.minimum(rows.seq_lens_np, max_lens_np)
    here = ends_np > starts_np
    spans = Spans(rows.req_indices_np[here], starts_np[here], ends_np[here])
    return spans.rows(rows.input_ids[mx.array(within_np)], None)


class GreedyModel(PassNetwork):
    """Predicts the tokens that a model would generate greedily."""

    def __init__(self, parts: ModelParts) -> None:
        self.module = parts.model
        self._parts = parts

    def next_tokens(self, inputs: PassInputs, caches: list[Any]) -> tuple[mx.array, None]:
        """The likeliest next tokens; see PassNetwork."""
        of_rows = ForwardInputs(inputs.input_ids, inputs.positions[None])
        hidden_states = self._parts.forward_hidden(of_rows, caches)
        if inputs.wanted is not None:
            hidden_states = hidden_states[inputs.wanted]
        logits = self._parts.compute_logits(hidden_states)
        return mx.argmax(logits, axis=-1).astype(mx.int32), None


class DraftModelProposer(PagedProposer):
    """Drafts the tokens that the draft model would generate greedily, one per pass."""

    def __init__(
        self,
        passes: Passes,
        max_num_reqs: int,
        num_drafts: int,
        max_len: int,
        images: ImageColumn | None = None,
    ) -> None:
        """
        Args:
            passes: run the draft model over the shared pool.
            max_num_reqs: number of req_idx.
            num_drafts: K, the most drafts of a request.
            max_len: the draft model's context length; longer requests get no drafts.
            images: the target's, None for text only. The draft model does not read images: a
                request with one gets no drafts, and K/V only for the text before its first image.
        """
        super().__init__(passes, num_drafts)
        self._max_len, self._images = max_len, images
        # By req_idx, how many positions have K/V. Drafts count until the next call of `propose`,
        # when rejected ones lie at or behind the newest token.
        self._written_np = np.zeros(max_num_reqs, np.int32)
        # By req_idx, how many of those may be of tokens that were not kept, at most.
        self._doubtful_np = np.zeros(max_num_reqs, np.int32)
        # By req_idx, the end of what `propose` was last called for: so far there are blocks.
        self._called_np = np.zeros(max_num_reqs, np.int32)

    def begin_request(self, req_idx: int, num_computed: int) -> None:
        self._written_np[req_idx] = self._called_np[req_idx] = num_computed
        self._doubtful_np[req_idx] = 0

    def propose(self, request: DraftRequest) -> Drafts:
        req_indices_np, num_tokens_np = request.req_indices_np, request.num_tokens_np
        most_tokens = request.most_tokens_np
        max_len = min(self._max_len, request.token_ids_np.shape[1])
        max_lens = _max_lens(req_indices_np, max_len, self._images)
        limits = request.limits_within(self._num_drafts, max_lens)
        written = self._written_np[req_indices_np]
        # The newest token has no K/V yet: at most a rejected draft was written at its position.
        # The drafts before it were accepted.
        sure = np.minimum(written - self._doubtful_np[req_indices_np], num_tokens_np - 1)
        # Where tokens are unread, the pass before ran over all that is known.
        ran = most_tokens > num_tokens_np
        starts = np.where(ran, np.minimum(written, num_tokens_np), sure)
        ends = np.minimum(most_tokens, max_lens)
        self._written_np[req_indices_np], self._called_np[req_indices_np] = starts, ends
        self._doubtful_np[req_indices_np] = 0
        token_ids = mx.zeros((len(req_indices_np), self._num_drafts), mx.int32)
        here = np.flatnonzero(ends > starts)
        if len(here) and (limits.any() or (ends - starts).max() > MAX_BEHIND):
            token_ids[mx.array(here)] = self._write(
                request.select(here), starts[here], ends[here], limits[here]
            )
        return Drafts(token_ids, limits)

    def complete_draft_kv(self, request: DraftRequest) -> None:
        req_indices_np = request.req_indices_np
        starts = self._written_np[req_indices_np] - self._doubtful_np[req_indices_np]
        ends = np.minimum(request.num_tokens_np - 1, self._called_np[req_indices_np])
        here = np.flatnonzero(ends > starts)
        if len(here):
            self._write(request.select(here), starts[here], ends[here], request.limits_np[here])

    def _write(
        self,
        request: DraftRequest,
        starts_np: np.ndarray,
        ends_np: np.ndarray,
        limits_np: np.ndarray,
    ) -> mx.array:
        """Writes K/V of positions [starts, ends), and drafts the tokens that follow.

        Args:
            request: the R requests.
            starts_np, ends_np: [R] int32, positions to write; no range is empty.
            limits_np: [R] int32, drafts of each request.
        """
        spans, lag = Spans(request.req_indices_np, starts_np, ends_np), request.lag
        drafts = self._draft(spans, spans.tokens(request), None, limits_np, lag)
        self._written_np[spans.req_indices_np] = ends_np + np.maximum(limits_np - 1, 0)
        self._doubtful_np[spans.req_indices_np] = 0 if lag is None else lag.most_np
        return drafts
