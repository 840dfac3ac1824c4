# SPDX-License-Identifier: Apache-2.0
"""A block drafter's module: mlx-vlm's layers and heads, our attention, the target's embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.engine.models.parts import HiddenStates, ModelParts
from vllm_metal.engine.spec_decode import packed_network
from vllm_metal.engine.spec_decode.block_attention import BlockAttention, CastingCache
from vllm_metal.engine.spec_decode.block_config import BlockConfig
from vllm_metal.engine.spec_decode.block_heads import (
    ArgmaxHead,
    BlockHead,
    MarkovHead,
    SelectorHead,
)
from vllm_metal.engine.spec_decode.network import LAYER_PREFIX
from vllm_metal.patches.mlx_patches import mlx_vlm_families, rotations
from vllm_metal.patches.mlx_patches.seam import AttendingCache

#: Arrays that are not loaded: a training table, angles that MLX computes, confidences.
_LEFT_OUT = ("t2d", "confidence_head.")
#: Published names of parts that mlx-vlm's modules call otherwise.
_RENAMED = (("encoder.output_norm_enc.", "hidden_norm."), ("encoder.fc.", "fc."))
_CODEBOOKS = tuple(f"candidate_selector.{kind}_codebook" for kind in ("predecessor", "successor"))
_ENDS = ("embed_tokens", "lm_head")


class BlockDrafter(nn.Module):
    """Drafts blocks of tokens over caches that hold the context."""

    def __init__(self, config: BlockConfig, dtype: mx.Dtype, pool_dtype: mx.Dtype) -> None:
        """
        Args:
            config: the drafter's shape.
            dtype: dtype of the drafter's activations.
            pool_dtype: dtype of the keys and values that the target's pool takes.
        """
        super().__init__()
        self.config, self.dtype, self.pool_dtype = config, dtype, pool_dtype
        self.network = _network(config)
        self.embedding_scale = config.embedding_scale
        self.d2t: mx.array | None = None  # how far the target's numbers are from the head's
        self.mask_embedding: mx.array | None = None  # [H]; None: that of the mask's token

    def load(self, weights: Mapping[str, mx.array], bits: int | None) -> None:
        """Loads a checkpoint's arrays.

        Args:
            weights: arrays by published names; dense, or packed by MLX's tools.
            bits: quantizes dense linear layers to this width; None: leaves them dense.

        Raises:
            ValueError: arrays are missing, or do not fit the modules.
        """
        named = _named(weights, self.config)
        d2t = named.pop("d2t", None)
        size, rows = self.config.hidden_size, self.config.draft_vocab_size
        ends: dict[str, Callable[[], nn.Module]] = {
            "embed_tokens": lambda: nn.Embedding(self.config.vocab_size, size),
            "lm_head": lambda: nn.Linear(size, rows, bias=False),
        }
        for name in _ENDS:
            if f"{name}.weight" in named or self.config.own_ends:
                setattr(self, name, ends[name]())
        ours = {
            name if name.startswith(_ENDS) else f"network.{name}": array
            for name, array in named.items()
        }
        packed = packed_network.packings(self, ours)
        nn.quantize(self, class_predicate=lambda path, module: packed.get(path, False))
        self.load_weights(list(ours.items()))
        if bits is not None:
            packed_network.pack(self.network, bits)
        self.eval()
        if d2t is not None:
            self.d2t = d2t.astype(mx.int32)
        mx.eval(self.parameters())

    def attach_ends(self, target: ModelParts) -> None:
        """Uses the target's embedding and output head where the checkpoint has none.

        Raises:
            NotImplementedError: the target's embedding or head cannot be shared.
        """
        if "embed_tokens" not in self:
            self.embed_tokens = target.input_embedding
            self.embedding_scale *= target.embedding_scale()
        if "lm_head" not in self:
            self.lm_head = target.output_head

    @property
    def head(self) -> BlockHead:
        """The head that chooses tokens, by the checkpoint's kind."""
        config, network = self.config, self.network
        if config.selector is not None:
            transform = partial(_scaled, scale=config.logit_scale, softcap=config.softcap)
            return SelectorHead(network.candidate_selector, transform)
        if config.markov_rank is not None:
            transform = partial(_scaled, scale=config.logit_scale, softcap=config.softcap)
            return MarkovHead(network.markov_head, transform, config.draft_topk, self.d2t)
        return ArgmaxHead()

    def write_context(
        self,
        hidden: mx.array,
        caches: Sequence[AttendingCache],
        indices: mx.array | None = None,
    ) -> None:
        """Writes the drafter's K/V of T tokens of the target's step.

        Args:
            hidden: [T, W] hidden states of the target's layers, concatenated.
            caches: one per layer, of the target's step.
            indices: [T] int32, index of each token in its request, which the drafter rotates by;
                None: the target's positions.
        """
        network = self.network
        hidden = hidden.astype(self.dtype)
        if self.config.is_laguna:
            taps = mx.split(hidden, len(network.aux_hidden_norms), axis=-1)
            normed = [norm(tap) for norm, tap in zip(network.aux_hidden_norms, taps, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        context = network.hidden_norm(network.fc(hidden))
        for layer, cache in zip(network.layers, self._casting(caches), strict=True):
            rows = layer.input_layernorm(context) if self.config.is_laguna else context
            layer.self_attn.write(rows, network.rope, cache, indices)

    def hidden(self, input_ids: mx.array, caches: Sequence[AttendingCache]) -> mx.array:
        """Normed hidden states [R, L, H] of R blocks of L tokens.

        Args:
            input_ids: [R, L] int32, each block's newest token followed by mask tokens.
            caches: one per layer, for the R * L tokens of the blocks.
        """
        states = self.embed_tokens(input_ids).astype(self.dtype) * self.embedding_scale
        if self.mask_embedding is not None:
            masked = (input_ids == self.config.mask_token_id)[..., None]
            states = mx.where(masked, self.mask_embedding, states)
        network = self.network
        for layer, cache in zip(network.layers, self._casting(caches), strict=True):
            states = layer(states, None, network.rope, cache)
        normed: mx.array = network.norm(states)
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [R, K, V] of the K drafted positions, from [R, L, H] hidden states."""
        rows = hidden if self.config.from_anchor else hidden[:, 1:]
        logits = self.lm_head(rows)
        if self.config.selector is None:
            logits = _scaled(logits, self.config.logit_scale, self.config.softcap)
        return logits

    def draft(self, input_ids: mx.array, caches: Sequence[AttendingCache]) -> mx.array:
        """Drafts [R, K] int32, as the target's token ids; takes the arguments of `hidden`."""
        hidden = self.hidden(input_ids, caches)
        drafting = hidden if self.config.from_anchor else hidden[:, 1:]
        found, _ = self.head.choose(drafting, self.logits(hidden), input_ids[:, 0])
        return found if self.d2t is None else (found + self.d2t[found]).astype(mx.int32)

    def drafted_tokens(self) -> mx.array:
        """[V] int32, the target's ids of the tokens that the drafter's own head can draft."""
        drafted = mx.arange(self.config.draft_vocab_size, dtype=mx.int32)
        return drafted if self.d2t is None else drafted + self.d2t

    def _casting(self, caches: Sequence[AttendingCache]) -> Sequence[AttendingCache]:
        # float16 drafts are hardly ever accepted: large states overflow.
        if self.dtype == mx.float32 or self.pool_dtype == self.dtype:
            return caches
        return [CastingCache(cache, self.pool_dtype) for cache in caches]


def draft_layers(config: BlockConfig, dtype: mx.Dtype) -> list[AttentionLayer]:
    """Describes the drafter's layers to the KV cache."""
    kinds = zip(config.windows, config.causal, strict=True)
    rotation = _rotation(config, dtype)
    return [
        AttentionLayer(
            f"{LAYER_PREFIX}layers.{index}",
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            window,
            sinks=dtype if config.sinks else None,
            rotation=rotation,
            bidirectional=not causal,
            is_auxiliary=True,
        )
        for index, (window, causal) in enumerate(kinds)
    ]


def join_target(drafter: BlockDrafter, target: ModelParts) -> None:
    """Makes every forward of the target write the drafter's K/V.

    Raises:
        NotImplementedError: the target does not expose the hidden states that the drafter reads.
    """
    ids = drafter.config.target_layer_ids
    states = HiddenStates(target, ids, "target_layer_ids", outlive_forward=False)
    target.write_context(
        lambda caches, indices: drafter.write_context(states.take(), caches, indices),
        drafter.config.num_layers,
    )


def _network(config: BlockConfig) -> Any:
    module = mlx_vlm_families.drafter(config.module, f"a drafter of {config.module}")
    network = module.Model(module.ModelConfig(**_arguments(config)))
    for name in (*_ENDS, "embed_scale", "argmax_from_hidden"):
        network.pop(name, None)
    for layer in network.layers:
        layer.self_attn = BlockAttention(config)
    num_taps = len(config.target_layer_ids)
    network.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
    if config.is_laguna:
        norms = [
            nn.RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(num_taps)
        ]
        network.aux_hidden_norms = norms
    network.rope = _rope(config)
    if config.markov_rank is not None:
        network.markov_head.markov_w2 = nn.Linear(
            config.markov_rank, config.draft_vocab_size, bias=False
        )
    return network


def _rope(config: BlockConfig) -> Any:
    rope = dict(config.rope)
    base = rope.pop("rope_theta")
    shape = _rotated(config, rope), base, config.interleaved
    return initialize_rope(*shape, rope or None, config.max_len)


def _rotation(config: BlockConfig, dtype: mx.Dtype) -> LayerRotation | None:
    """Returns the RoPE of queries and keys that a write can apply; None: the layer applies it."""
    positions, rows = mx.zeros(1, mx.int32), mx.zeros((1, 1, 1, config.head_dim), dtype)
    with rotations.noted():
        of = rotations.of_keys(positions, _rope(config)(rows, offset=positions))
    return None if of is None else LayerRotation(of.keys.rotation.kind, queries=True)


def _rotated(config: BlockConfig, rope: Mapping[str, Any]) -> int:
    """How many elements of a head are rotated; proportional ropes leave some out themselves."""
    if rope.get("rope_type") == "proportional":
        return config.head_dim
    return int(config.head_dim * rope.get("partial_rotary_factor", 1.0))


def _arguments(config: BlockConfig) -> dict[str, Any]:
    """Arguments of mlx-vlm's configuration; those of parts that are replaced only pass checks."""
    ids = [layer - 1 for layer in config.target_layer_ids]
    given: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": ids,
        "num_target_layers": max(ids) + 1,
        "layer_types": ["full_attention"] * config.num_layers,  # ours attends as BlockConfig says
    }
    if config.selector is not None and config.conv is not None:
        given["conv_kernel_size"], given["conv_group_size"] = config.conv
        given["selector_rank"] = config.selector.rank
        given["selector_top_k"] = config.selector.top_k
        given["is_causal"] = False  # ours attends as BlockConfig says
    if config.markov_rank is not None:
        given |= {"markov_rank": config.markov_rank, "enable_confidence_head": False}
        given |= {"block_size": 2, "proposal_length": 1}  # not read: ours lays blocks out
    if config.is_laguna:
        each = list(range(config.num_layers))
        given |= {"model_type": "laguna", "gating": "per-head", "causal": True, "block_size": 2}
        given |= {"layer_types": ["sliding_attention"] * len(each), "sliding_window": 1}
        given |= {"sliding_windows": [1] * len(each), "target_layer_ids": each}
        given |= {"aux_hidden_state_layer_ids": each, "num_target_layers": len(each)}
        given |= {"draft_vocab_size": config.vocab_size, "rope_theta": 1.0}
        given["max_position_embeddings"] = config.max_len
    return given


def is_left_out(published: str) -> bool:
    """Whether an array of the checkpoint is not loaded."""
    name = published.removeprefix("model.")
    return name.startswith(_LEFT_OUT) or "rotary_emb" in name


def _named(weights: Mapping[str, mx.array], config: BlockConfig) -> dict[str, mx.array]:
    found = {}
    for published, array in weights.items():
        name = published.removeprefix("model.").replace("midlayer.", "layers.0.")
        if is_left_out(published):
            continue
        for before, after in _RENAMED:
            name = name.replace(before, after)
        if ".qkv_proj." in name:  # Laguna's, rows of queries before those of keys and values
            kept = config.num_kv_heads * config.head_dim
            places = [len(array) - 2 * kept, len(array) - kept]
            for kind, part in zip("qkv", mx.split(array, places), strict=True):
                found[name.replace("qkv_proj", f"{kind}_proj")] = part
            continue
        found[f"{name}.weight" if name in _CODEBOOKS else name] = array
    return found


def _scaled(logits: mx.array, scale: float, softcap: float | None) -> mx.array:
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else mx.tanh(logits / softcap) * softcap
