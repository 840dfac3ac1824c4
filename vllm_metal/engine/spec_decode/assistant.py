# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants: small drafters that attend to K/V of the target's last layers.

An assistant keeps no K/V. Each pass reads a token and the hidden states that it followed from, as
if it were at the position of the newest hidden state; so all passes of a step have one position
and one context, as in vLLM's `Gemma4Proposer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from metal_kernels.layout import PositionLag
from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.attention.paged_cache import SharedCache
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.memory.profile import LargestStep
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import HiddenStates, ModelParts
from vllm_metal.engine.spec_decode import packed_network, vocabulary
from vllm_metal.engine.spec_decode.assistant_config import AssistantConfig
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.mtp_folders import published
from vllm_metal.engine.spec_decode.network import DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.paged_head import HeadProposer
from vllm_metal.engine.spec_decode.passes import Passes, PassInputs, PassNetwork
from vllm_metal.engine.spec_decode.proposer import Proposer
from vllm_metal.engine.spec_decode.spans import KeptRows, Spans
from vllm_metal.identity import model_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Published arrays of layers that would have K/V of their own; angles that MLX computes.
_LEFT_OUT = (".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.", "rotary_emb")


class Assistant(Head):
    """Computes what vLLM's `Gemma4MTP` and transformers' `Gemma4AssistantForCausalLM` compute."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        args, size = config.layers, config.backbone_hidden_size
        self.input_size, self._embedding_scale = size, size**0.5
        self.model = _Layers(args)
        self.pre_projection = nn.Linear(2 * size, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, size, bias=False)
        if not config.is_tied:
            self.lm_head = nn.Embedding(args.vocab_size, args.hidden_size)
        if config.clusters is not None:
            self.masked_embedding = _Clusters(args, *config.clusters)

    def load(self, weights: Mapping[str, mx.array]) -> None:
        """Loads a checkpoint's arrays by their published names; dense, or packed by MLX's tools.

        Raises:
            ValueError: arrays are missing, or do not fit the modules.
        """
        named = {name: array for name, array in weights.items() if not self.leaves_out(name)}
        if (order := named.get(_Clusters.ORDER)) is not None:
            named[_Clusters.ORDER] = order.astype(mx.int32)
        packed = packed_network.packings(self, named)
        nn.quantize(self, class_predicate=lambda path, module: packed.get(path, False))
        self.load_weights(list(named.items()))
        self.eval()
        mx.eval(self.parameters())

    def leaves_out(self, name: str) -> bool:
        """Whether an array of the checkpoint is not loaded."""
        is_copy = name.startswith("lm_head.") and "lm_head" not in self
        return is_copy or any(part in name for part in _LEFT_OUT)

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[Any]
    ) -> tuple[mx.array, mx.array]:
        """See Head; `caches` are those of `attended_layers`, and `embeds` are not yet scaled."""
        by_kind = dict(zip(self.kinds, caches, strict=True))
        both = mx.concatenate([embeds * self._embedding_scale, hidden], axis=-1)
        states = self.pre_projection(both)[:, None]
        for layer in self.model.layers:
            cache = by_kind[layer.layer_type]
            kept = cache.keys_and_values()
            states, *_ = layer(states, shared_kv=kept, offset=cache.offset)
        normed = self.model.norm(states)[:, 0]
        return normed, self.post_projection(normed)

    def drafts(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[SharedCache[Any]], count: int
    ) -> mx.array:
        """Drafts tokens one after another, [N, count] int32.

        Args:
            tokens: [N] int32, each request's newest token.
            hidden: [N, H], the target's final hidden states that gave it.
            caches: caches of `attended_layers`, for N tokens whose K/V are not stored.
            count: number of drafts.
        """
        for layer, cache in zip(self._first_of_kinds, caches, strict=True):
            attention = layer.self_attn
            shape = len(tokens), attention.n_kv_heads, 1, attention.head_dim
            none = mx.zeros(shape, hidden.dtype)
            cache.update_and_fetch(none, none)  # orders the reads behind the target's writes
        found: list[mx.array] = []
        for _ in range(count):
            embeds = self.embed_tokens(tokens).astype(hidden.dtype)
            out, hidden = self(embeds, hidden, caches)
            tokens = self.tokens(out)
            found.append(tokens)
        return mx.stack(found, axis=1)

    @property
    def kinds(self) -> list[str]:
        """Kinds of attention that the layers have, in the order of their caches."""
        return list(dict.fromkeys(layer.layer_type for layer in self.model.layers))

    @property
    def _first_of_kinds(self) -> list[Any]:
        layers = self.model.layers
        return [next(each for each in layers if each.layer_type == kind) for kind in self.kinds]

    def attended_layers(self, target: ModelParts) -> list[AttentionLayer]:
        """The target's layers that the assistant reads: by kind, the last one with K/V of its own.

        Raises:
            loader.ModelLoadError: the target has no such layers.
        """
        found = []
        for layer in self._first_of_kinds:
            kind, own = layer.layer_type, layer.self_attn
            window = self.model.window if own.is_sliding else None
            given = _Kept(own.n_kv_heads, own.head_dim, window)
            index, theirs = _last_of_kind(target, kind)
            if given[:2] != theirs[:2] or (window or 0) > (theirs.window or 0):
                raise loader.ModelLoadError(
                    f"the draft reads {given} in the model's last layer of {kind}, which keeps "
                    f"{theirs}: choose an assistant that was made for this model"
                )
            sizes = own.n_heads, own.n_kv_heads, own.head_dim
            found.append(AttentionLayer(f"layers.{index}", *sizes, window, readers=1))
        return found

    @property
    def _output(self) -> nn.Embedding:
        """The embedding whose rows score tokens."""
        return self.lm_head if "lm_head" in self else self.model.embed_tokens

    def drafted_tokens(self) -> mx.array:
        """[V] int32, the tokens that can be drafted."""
        if "masked_embedding" in self:
            return self.masked_embedding.token_ordering
        return mx.arange(len(self._output.weight), dtype=mx.int32)

    def tokens(self, out: mx.array) -> mx.array:
        """[N] int32, the likeliest token of each of [N, H] outputs."""
        if "masked_embedding" not in self:
            return mx.argmax(self._output.as_linear(out), axis=-1).astype(mx.int32)
        ids, logits = self.masked_embedding(out, self._output)
        best = mx.argmax(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(ids, best, axis=-1)[:, 0]


class _Layers(nn.Module):
    """The layers, named as in checkpoints."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.window = args.sliding_window
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)  # of the head alone
        self.layers = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)


class _Clusters(nn.Module):
    """Chooses clusters of tokens, and scores the tokens of these alone."""

    ORDER = "masked_embedding.token_ordering"  # its array in checkpoints

    def __init__(self, args: ModelArgs, num_clusters: int, num_chosen: int) -> None:
        super().__init__()
        self._num_chosen = num_chosen
        self.centroids = nn.Linear(args.hidden_size, num_clusters, bias=False)
        self.token_ordering = mx.zeros(args.vocab_size, mx.int32)  # those of a cluster together

    def __call__(self, out: mx.array, head: nn.Embedding) -> tuple[mx.array, mx.array]:
        """Scores tokens of the chosen clusters: [N, n] int32 ids and [N, n] logits.

        Args:
            out: [N, H].
            head: has a row for each token of the vocabulary.
        """
        scores, count = self.centroids(out), self._num_chosen
        chosen = mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
        num_clusters = scores.shape[-1]
        ids = self.token_ordering.reshape(num_clusters, -1)[chosen].flatten(1)
        if len(out) * count > num_clusters:  # reads fewer rows, and takes less memory
            return ids, mx.take_along_axis(head.as_linear(out), ids, axis=-1)
        return ids, (head(ids) @ out[..., None])[..., 0]


class _Kept(NamedTuple):
    """Keys and values that a layer keeps of a token, and for how many tokens."""

    num_heads: int
    head_size: int
    window: int | None

    def __str__(self) -> str:
        span = "" if self.window is None else f", of {self.window} tokens"
        return f"{self.num_heads} heads of {self.head_size} elements{span}"


def _last_of_kind(target: ModelParts, kind: str) -> tuple[int, _Kept]:
    """The last layer with K/V of its own that attends in this way, and what it keeps."""
    layers = [
        (index, layer.self_attn)
        for index, layer in enumerate(target.model.layers)
        if layer.layer_type == kind and layer.self_attn.has_kv
    ]
    if not layers:
        return -1, _Kept(0, 0, 0)
    index, own = layers[-1]
    window = target.text_args.sliding_window if own.is_sliding else None
    return index, _Kept(own.n_kv_heads, own.head_dim, window)


class AssistantNetwork(DraftNetwork):
    """An assistant loaded for its target."""

    layers = ()

    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        """Loads the assistant and makes the target record its final hidden states from now on.

        Args:
            config: vLLM's; its speculative_config names the checkpoint.
            target: the model that the assistant was made for.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded, or is for another target.
            NotImplementedError: the target does not expose its hidden states.
        """
        speculation = config.speculative_config
        assert speculation is not None
        model_config = speculation.draft_model_config
        folder = model_files.model_folder(model_config, config, model_files.HEAD_PATTERNS)
        head = Assistant(AssistantConfig.of(published(folder)))
        loader.check_draft_vocabulary(config)
        self.reading_layers = head.attended_layers(target)
        try:
            head.load(loader.load_weights(model_config, config))
        except ValueError as error:
            raise loader.ModelLoadError(
                f"the weights of {model_config.model} do not match its config.json: {error}"
            ) from error
        vocabulary.check_drafted(head.drafted_tokens(), config)
        head.embed_tokens = target.input_embedding
        self._config, self.head = config, head
        self._states = HiddenStates(target)
        self._num_drafts = speculation.num_speculative_tokens

    def profile(self, backend: KVBackend) -> None:
        num_reqs = self._config.scheduler_config.max_num_seqs
        placed = self.reading_layers, self._config, backend
        largest = LargestStep.of(*placed, drafts=0, num_reqs=num_reqs)
        shape = num_reqs, self.head.input_size
        hidden = mx.zeros(shape, loader.mlx_dtype(self._config))
        with largest.caches() as caches:
            inputs = largest.rows.input_ids, hidden, caches
            drafts = self.head.drafts(*inputs, self._num_drafts)
        mx.eval(drafts)

    def proposer(self, pool: DraftPool) -> Proposer:
        attended = {layer.name: pool.layer_states[layer.name] for layer in self.reading_layers}
        block_size = self._config.cache_config.block_size
        paged = PagedLayers(self.reading_layers, attended, pool.group_of, block_size)
        passes = Passes(AssistantPasses(self.head), paged, pool.block_tables, pool.graphs, 1)
        return AssistantProposer(self.head, passes, self._states, self._num_drafts)


class AssistantPasses(PassNetwork):
    """Drafts all tokens of a step in one pass."""

    module: Assistant

    def __init__(self, head: Assistant) -> None:
        self.module = head

    def next_tokens(
        self, inputs: PassInputs, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """Returns [T, count] drafts after the tokens of all T requests."""
        assert inputs.hidden is not None
        return self.module.drafts(inputs.input_ids, inputs.hidden, caches, inputs.count), None


class AssistantProposer(HeadProposer):
    """Drafts from the newest hidden state of each request, at its position."""

    writes_kv = False

    def _reads(self, spans: Spans, kept: Sequence[KeptRows]) -> tuple[Spans, mx.array]:
        """Leaves out tokens that are accepted for sure and not the newest ones."""
        starts_np = np.maximum(spans.starts_np, spans.ends_np - 1 - self._num_drafts)
        earlier = (starts_np - spans.starts_np).tolist()
        kept = [
            replace(of, first_row=of.first_row + count, start=of.start + count)
            for of, count in zip(kept, earlier, strict=True)
        ]
        return super()._reads(Spans(spans.req_indices_np, starts_np, spans.ends_np), kept)

    def _draft(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        limits_np: np.ndarray,
        lag: PositionLag | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        assert hidden is not None
        newest = mx.array(spans.query_start_loc_np[1:] - 1)
        if lag is not None:
            newest = newest - lag.counts
        single = Spans(spans.req_indices_np, spans.ends_np - np.int32(1), spans.ends_np)
        stored_np = np.zeros(len(limits_np), bool)
        rows = single.rows(input_ids[newest], None, lag, stored_np)
        count = int(limits_np.max())
        drafts, _ = self._passes.first(rows, hidden[newest], count=count)
        return mx.pad(drafts, [(0, 0), (0, self._num_drafts - count)])
