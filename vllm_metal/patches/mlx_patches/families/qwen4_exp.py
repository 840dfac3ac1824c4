# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve Qwen4-Exp: n-gram embeddings, gated delta layers and sparse attention.

Layers with an n-gram embedding keep two states: that of the gated delta rule, and one of the tokens
before and of a convolution. The delta rule is mlx-lm's, which steps can compute. Attention writes
its indexer's keys to a cache of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, renamed
from vllm_metal.patches.mlx_patches.families.forwards import joined
from vllm_metal.patches.mlx_patches.families.ngrams import after_state, tokens_before
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, GroupChoice

_INDEXED, _FULL = "indexed_attention", "full_attention"
_STATES = 2  # arrays of a recurrent state: convolution and delta rule, tokens and convolution
_SHARD = re.compile(r"(.*\.ngram_embedding)\.shards\.(\d+)\.(\w+)")
#: Text models of their own have names without the multimodal model's prefix.
_OF_TEXT = re.compile(r"^model\.(?=embed_tokens\.|layers\.|hyper_connection_mixer\.)")


def config(module: ModuleType) -> None:
    """Reads kinds of layers and the gate as transformers does."""
    base: Any = module.TextConfig

    @dataclass
    class TextConfig(base):
        layer_types: list[str] | None = None
        output_gate_type: str | None = None
        rope_parameters: dict[str, Any] | None = None

        def __post_init__(self) -> None:
            if self.layer_types is not None:
                self.layer_types = [_FULL if k == _INDEXED else k for k in self.layer_types]
            self.output_gate_type = self.output_gate_type or self.hidden_act
            # mlx-vlm requires the coordinates of images, and transformers has this default.
            self.rope_parameters = {"mrope_section": [11, 11, 10], **(self.rope_parameters or {})}
            super().__post_init__()

    TextConfig.__module__ = base.__module__
    module.TextConfig = TextConfig  # type: ignore[attr-defined]


def arrays(module: ModuleType) -> None:
    """Joins the shards of n-gram tables, and reads the names of text models."""
    wrap(module.Model, "sanitize", _joining)
    renamed(lambda name: _OF_TEXT.sub("model.language_model.", name))(module)


def language(module: ModuleType) -> None:
    """Lets caches attend and keep states."""
    from mlx_lm.models.qwen3_5 import GatedDeltaNet

    module.ShardedEmbedding = _one_table  # type: ignore[attr-defined]
    module.Qwen4ExpRMSNorm.__call__ = _normalize
    module.Qwen4ExpGatedResidual.__call__ = _mix
    module.Qwen4ExpGatedDeltaNet.sharding_group = None
    module.Qwen4ExpGatedDeltaNet.__call__ = GatedDeltaNet.__call__
    module.Qwen4ExpNGramEmbedding.__call__ = _embed_ngrams
    module.Qwen4ExpPLELayer._short_conv = _convolve
    module.Qwen4ExpDecoderLayer.__call__ = _layer
    module.Qwen4ExpModel.__call__ = _forward
    wrap(module.Qwen4ExpAttention, "__call__", _attending)
    after_init(module.Qwen4ExpAttention, _add_ropes)
    after_init(module.LanguageModel, _forget_positions)
    module.LanguageModel.__call__ = _logits
    module.LanguageModel.make_cache = _make_cache


def _joining(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def sanitize(self: Any, weights: Arrays) -> Arrays:
        shards: dict[str, dict[int, mx.array]] = {}
        found: Arrays = {}
        for name, array in before(self, weights).items():
            if (shard := _SHARD.fullmatch(name)) is None:
                found[name] = array
            else:
                shards.setdefault(f"{shard[1]}.{shard[3]}", {})[int(shard[2])] = array
        for name, parts in shards.items():
            found[name] = mx.concatenate([parts[number] for number in sorted(parts)])
        return found

    return sanitize


def _one_table(num_embeddings: int, dims: int, num_shards: int) -> nn.Embedding:
    # mlx-vlm's class waits for the rows' numbers on the host.
    return nn.Embedding(num_embeddings, dims)


def _embed_ngrams(self: Any, input_ids: mx.array, cache: Any) -> mx.array:
    """Returns [B, L, dims] rows of the n-grams that end at each token.

    Rows are chosen as by `Qwen4ExpTextNGramEmbedding` of transformers.
    """
    tokens = input_ids.astype(mx.int64)
    rows = ngram_rows(self, tokens, _tokens_before(self, tokens, cache))
    found: mx.array = self.ngram_embedding(rows)
    return found.flatten(-2)


def ngram_rows(layer: Any, tokens: mx.array, earlier: Sequence[mx.array]) -> mx.array:
    """Returns [..., heads] int64, the rows of n-grams in a layer's table.

    Args:
        layer: mlx-vlm's module with the numbers that choose rows.
        tokens: [...] int64.
        earlier: [...] int64 for each distance from 1 on, the tokens before each token; before a
            text, the token that ends texts.
    """
    multipliers, sizes = layer.layer_multipliers, layer.ngram_heads_vocab_sizes
    heads, end = layer.heads_per_ngram, layer.eos_token_id
    mixed, is_over, rows = tokens * multipliers[0], tokens < 0, []
    for number, token in enumerate(earlier, start=1):
        # n-grams do not reach into the text before.
        is_over = is_over | (token == end)
        mixed = mixed ^ (mx.where(is_over, end, token) * multipliers[number])
        of_order = slice((number - 1) * heads, number * heads)
        rows.append(mixed[..., None] % sizes[of_order] + layer.ngram_heads_offsets[of_order])
    return mx.concatenate(rows, axis=-1)


def _tokens_before(self: Any, input_ids: mx.array, cache: Any) -> list[mx.array]:
    """Returns [B, L] int64 for each distance from 1 on; before a text, the end of a text."""
    end = self.eos_token_id
    found = tokens_before(input_ids - end, cache, self.context_len, self.layer_multipliers)
    return [each + end for each in found]


def _convolve(self: Any, x: mx.array, cache: Any) -> mx.array:
    """Computes the dilated convolution of an n-gram layer, [B, L, C]."""
    if isinstance(cache, SequenceCall):
        gap = self.conv_dilation - 1
        weight = mx.pad(self.conv1d.weight, [(0, 0), (0, 0), (0, gap)]).flatten(1)
        weight = weight[:, : weight.shape[1] - gap]
        return nn.silu(cache.convolve(x[0], weight, None))[None]
    return nn.silu(self.conv1d(after_state(x, cache, 1, self.short_conv_state_len)))


# The module compiles these for each number of tokens, and `fit` cannot record compiled operations.
def _normalize(self: Any, x: mx.array) -> mx.array:
    """Computes `Qwen4ExpTextRMSNorm` of transformers, in groups where there are any."""
    rows = x.astype(mx.float32)
    groups = rows if self.group_size is None else mx.unflatten(rows, -1, (-1, self.group_size))
    normed = mx.fast.rms_norm(groups, None, self.eps).reshape(x.shape)
    return (normed * (1.0 + self.weight.astype(mx.float32))).astype(x.dtype)


def _mix(self: Any, streams: mx.array) -> Any:
    """Computes `Qwen4ExpTextGatedResidual` of transformers."""
    normed, count = self.hc_norm(streams), self.hc_count
    shares = nn.silu(self.input_mix_weight_down(normed) / count)
    weighted = mx.sigmoid(self.input_mix_weight_up(shares)) * normed
    mixed = mx.unflatten(weighted, -1, (count, self.hidden_size)).mean(axis=-2)
    if "block_inject_weight" not in self:
        return mixed
    return mixed, streams, 2 * mx.sigmoid(self.block_inject_weight(normed) / count)


def _layer(
    self: Any,
    hidden: mx.array,
    input_ids: mx.array,
    mask: Any = None,
    cache: Any = None,
    position_ids: Any = None,
) -> mx.array:
    """Computes `Qwen4ExpTextDecoderLayer` of transformers; `cache` may hold two."""
    if "ple" in self:
        cache, of_ngrams = (None, None) if cache is None else (cache[0], cache[1])
        hidden = hidden + self.ple(hidden, input_ids, of_ngrams, None)
    mixer = self.linear_attn if self.is_linear else self.self_attn
    for connection, branch in (
        (self.attn_hyper_connection, lambda x: mixer(x, None, cache)),
        (self.mlp_hyper_connection, self.mlp),
    ):
        mixed, streams, weights = connection(hidden)
        injected = branch(mixed)[..., None, :] * weights[..., None]
        hidden = streams + injected.flatten(-2)
    return hidden


def _forward(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
    hidden = mx.tile(self.embed_tokens(inputs), (1, 1, self.args.hc_count))
    caches = [None] * len(self.layers) if cache is None else cache
    for layer, of_layer in zip(self.layers, caches, strict=True):
        hidden = layer(hidden, inputs, None, of_layer)
    mixed: mx.array = self.hyper_connection_mixer(hidden)
    return mixed


def _logits(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> Any:
    from mlx_vlm.models.base import LanguageModelOutput

    hidden = self.model(inputs, cache=cache)
    tied = self.args.tie_word_embeddings
    head = self.model.embed_tokens.as_linear if tied else self.lm_head
    return LanguageModelOutput(logits=head(hidden))


def _forget_positions(self: Any, *args: Any, **options: Any) -> None:
    # Images would set them for one text; `_forward` asks the caches.
    del self._position_ids, self._rope_deltas


def _make_cache(self: Any) -> list[Any]:
    found: list[Any] = []
    for layer in self.layers:
        if not layer.is_linear:
            found.append(CacheList(KVCache(), KVCache()))
        elif "ple" in layer:
            found.append(CacheList(ArraysCache(_STATES), ArraysCache(_STATES)))
        else:
            found.append(ArraysCache(_STATES))
    return found


def _add_ropes(self: Any, args: Any) -> None:
    # For positions of text, whose three coordinates are equal.
    rope = args.rope_parameters
    dims = int(self.head_dim * rope["partial_rotary_factor"])
    self.rope = nn.RoPE(dims, traditional=False, base=rope["rope_theta"])


@dataclass
class _Keys:
    """Both dense caches of a layer, as mlx-vlm's module expects them in one."""

    own: KVCache
    of_indexer: KVCache

    @property
    def offset(self) -> int:
        return int(self.own.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.own.update_and_fetch(keys, values)

    def update_indexer(self, keys: mx.array, position_ids: mx.array) -> tuple[mx.array, mx.array]:
        """Adds [B, L, D] keys; returns all of them, and their positions."""
        rows = keys[:, None]
        found = self.of_indexer.update_and_fetch(rows, rows)[0][:, 0]
        return found, mx.broadcast_to(mx.arange(found.shape[1]), found.shape[:2])


def _attending(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], AttendingCache):
            own = (KVCache(), KVCache()) if cache is None else cache
            return dense(self, x, mask=mask, cache=_Keys(*own))
        own = cache[0]
        heads = (self.num_attention_heads, 2 * self.head_dim)
        queries, gate = mx.split(mx.unflatten(self.q_proj(x), -1, heads), 2, axis=-1)
        queries, gate = self.q_norm(queries).swapaxes(1, 2), gate.flatten(2)
        of_kv = (self.num_key_value_heads, self.head_dim)
        keys = self.k_norm(mx.unflatten(self.k_proj(x), -1, of_kv)).swapaxes(1, 2)
        values = mx.unflatten(self.v_proj(x), -1, of_kv).swapaxes(1, 2)
        queries, keys = self.rope(queries, own.offset), self.rope(keys, own.offset)
        own.update_and_fetch(keys, values)
        chosen = _chosen(self.indexer, self.rope, x, cache[1])
        out = own.attend_to_blocks(queries, self.scale, chosen)
        projected: mx.array = self.o_proj(joined(out) * mx.sigmoid(gate))
        return projected

    return attention


def _chosen(indexer: Any, rope: Any, x: mx.array, cache: AttendingCache) -> Any:
    heads = (indexer.n_heads + indexer.kv_heads, indexer.head_dim)
    rows = mx.unflatten(indexer.index_qk_proj(x), -1, heads)
    queries, keys = mx.split(rows.swapaxes(1, 2), [indexer.n_heads], axis=1)
    queries = rope(indexer.q_layernorm(queries), cache.offset)
    size, dtype = indexer.compress_ratio, keys.dtype

    def pooled(rows: mx.array) -> mx.array:
        # A group has the position of its first row, so `scale` is the distance of two.
        found = indexer.k_layernorm(rows.mean(axis=2).astype(dtype))
        base = {"traditional": False, "base": rope.base, "scale": size, "offset": 0}
        return mx.fast.rope(found, rope.dims, **base).astype(mx.float32)

    return cache.choose(keys, queries, None, GroupChoice(size, indexer.block_topk, pooled))
