# SPDX-License-Identifier: Apache-2.0
"""EAGLE and EAGLE-3 as proposers: a head of a layer or so on the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.kv_cache.region import Region
from vllm_metal.models import loader
from vllm_metal.models.executor import PagedLayers
from vllm_metal.models.layers import AttentionLayer
from vllm_metal.models.profile import largest_caches, largest_step
from vllm_metal.requests import BlockTables
from vllm_metal.rows import Rows
from vllm_metal.spec_decode.eagle_head import Eagle3Head, EagleHead, HeadConfig
from vllm_metal.spec_decode.model import LAYER_PREFIX, DraftNetwork, PagedProposer, Spans
from vllm_metal.spec_decode.proposer import Drafts, Proposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Architectures, as vLLM names them, with layers like Llama's.
HEADS: dict[str, type[EagleHead] | type[Eagle3Head]] = {
    "EagleLlamaForCausalLM": EagleHead,
    "Eagle3LlamaForCausalLM": Eagle3Head,
    "LlamaForCausalLMEagle3": Eagle3Head,
}


class Eagle(DraftNetwork):
    """A head loaded for its target."""

    def __init__(
        self, config: VllmConfig, target: nn.Module, selected: loader.SelectedRows
    ) -> None:
        """Loads it, and has the target's hidden states noted from now on.

        Args:
            config: whose speculative_config names the head.
            target: the model it was trained for.
            selected: the target's row selection.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded, or is of another target.
            NotImplementedError: the head is of a family that is not served, or the target does not
                show what the head needs.
        """
        speculation = config.speculative_config
        assert speculation is not None
        self._config = config
        self._num_drafts = speculation.num_speculative_tokens
        model_config = speculation.draft_model_config
        (family, *_) = model_config.architectures
        if family not in HEADS:
            raise NotImplementedError(
                f"--speculative-config: heads of {family} are not supported (choose one of "
                f"{', '.join(HEADS)})"
            )
        shape = HeadConfig.of(model_config.hf_config.to_dict())
        weights = {
            name.replace("midlayer.", "layers.0."): array
            for name, array in loader.load_weights(model_config, config).items()
            # Masks of the reduced vocabulary and tables of angles say nothing new.
            if name != "t2d" and "rotary_emb" not in name
        }
        self.head = HEADS[family](shape, set(weights))
        try:
            self.head.load_weights(list(weights.items()))
        except ValueError as error:
            raise loader.ModelLoadError(f"{model_config.model} is no {family}: {error}") from error
        if "embed_tokens" not in self.head:
            self.head.embed_tokens = loader.input_embedding(target)
        if "lm_head" not in self.head:
            self.head.lm_head = loader.output_head(target)
        mx.eval(self.head.parameters())
        layer_ids = self.head.layer_ids(len(target.layers))
        self._states = loader.HiddenStates(target, selected, layer_ids)
        args = shape.decoder
        head_size = args.head_dim or args.hidden_size // args.num_attention_heads
        assert args.num_key_value_heads is not None
        self.layers = [
            AttentionLayer(
                f"{LAYER_PREFIX}layers.{index}",
                args.num_attention_heads,
                args.num_key_value_heads,
                head_size,
                None,
            )
            for index in range(args.num_hidden_layers)
        ]

    def profile(self, region_type: type[Region]) -> None:
        num_tokens, sampled = largest_step(self._config)
        caches = largest_caches(self.layers, self._config, region_type)
        hidden = mx.zeros((num_tokens, self.head.input_size), loader.mlx_dtype(self._config))
        out, _ = self.head(mx.zeros(num_tokens, mx.int32), self.head.combine(hidden), caches)
        mx.eval(self.head.tokens(out[sampled]))

    def proposer(
        self,
        regions: Mapping[str, Region],
        group_of: Mapping[str, int],
        block_tables: BlockTables,
    ) -> Proposer:
        own = {layer.name: regions[layer.name] for layer in self.layers}
        paged = PagedLayers(self.layers, own, group_of, self._config.cache_config.block_size)
        return EagleProposer(self.head, paged, block_tables, self._states, self._num_drafts)


@dataclass(frozen=True)
class _Kept:
    """Hidden states of a request's rows in its newest step."""

    states: mx.array  # [T, W] of the whole step
    first_row: int
    start: int  # position of the first row
    count: int


class EagleProposer(PagedProposer):
    """Drafts from the hidden states of the step before, then from the head's own."""

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        paged: PagedLayers,
        block_tables: BlockTables,
        states: loader.HiddenStates,
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
        self._kept: dict[int, _Kept] = {}  # by slot
        self._written: dict[int, int] = {}  # by slot, end of what has been run of those

    def begin(self, slot: int, num_computed: int) -> None:
        self.forget(slot)

    def forget(self, slot: int) -> None:
        self._kept.pop(slot, None)
        self._written.pop(slot, None)

    def take_hidden(self, rows: Rows) -> None:
        states = self._states.take()
        firsts, counts = rows.query_start_loc_np[:-1], np.diff(rows.query_start_loc_np)
        starts = rows.positions_np[firsts]
        for slot, *of_request in zip(
            rows.slots_np.tolist(), firsts.tolist(), starts.tolist(), counts.tolist(), strict=True
        ):
            self._kept[slot] = _Kept(states, *of_request)
            self._written.pop(slot, None)

    def propose(
        self,
        token_ids_np: np.ndarray,
        slots_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
    ) -> Drafts:
        nothing = _Kept(mx.zeros(0), 0, 0, 0)
        kept = [self._kept.get(slot, nothing) for slot in slots_np.tolist()]
        starts = np.array([of.start for of in kept], np.int32)
        counts = np.array([of.count for of in kept], np.int32)
        # A row takes the token after it; rows of drafts that were refused lie past the newest one.
        ends = np.minimum(starts + counts, num_tokens_np - 1)
        usable = ends > starts
        most = np.minimum(token_ids_np.shape[1] - num_tokens_np, self._num_drafts)
        limits = np.maximum(np.minimum(limits_np, most), 0).astype(np.int32)
        limits[~usable | (ends < num_tokens_np - 1)] = 0
        written = np.array([self._written.get(slot, 0) for slot in slots_np.tolist()])
        here = np.flatnonzero(usable & ((limits > 0) | (written < ends)))
        token_ids = mx.zeros((len(slots_np), self._num_drafts), mx.int32)
        if len(here):
            spans = Spans(slots_np[here], starts[here], ends[here])
            following = token_ids_np[spans.slots_np[spans.index_np], spans.positions_np + 1]
            hidden = self._head.combine(_rows_of([kept[index] for index in here], spans))
            drafts = self._draft(spans, mx.array(following), hidden, limits[here])
            token_ids[mx.array(here)] = drafts
            self._written |= zip(spans.slots_np.tolist(), spans.ends_np.tolist(), strict=True)
        return Drafts(token_ids, limits)

    def _pass(self, rows: Rows, hidden: mx.array | None) -> tuple[mx.array, mx.array | None]:
        assert hidden is not None
        caches = self._paged.begin_step(rows, self._block_tables)
        out, hidden = self._head(rows.input_ids, hidden, caches)
        if rows.logits_indices is not None:
            out, hidden = out[rows.logits_indices], hidden[rows.logits_indices]
        return self._head.tokens(out), hidden


def _rows_of(kept: list[_Kept], spans: Spans) -> mx.array:
    """[T, W] hidden states of the spans' rows; all of one step, unless a request sat one out."""
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
