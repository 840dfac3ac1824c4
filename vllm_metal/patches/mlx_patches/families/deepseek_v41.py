# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve DeepSeek V4.1, and rejects what mlx-lm's module does not compute.

Every layer attends to a window of positions, and most layers to compressed entries beside it. Some
layers compute these entries and an indexer's keys of them (`kv_source_layer_ids`), and later layers
read those of the last such layer. The same holds for choices of entries
(`index_source_layer_ids`). One indexer also chooses blocks of entries, among which all later ones
choose (`candidate_source_layer_id`).

The pool holds for each layer the rows of its window, and for each source of entries these, their
index keys, and rows of the group that is still open: see `engine/attention/compressed_layer.py`.
Choices live as long as a forward, in the dictionary that mlx-lm's layers share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import BaseModelArgs

from vllm_metal.patches.mlx_patches.families import engram
from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.deepseek_v4 import check_scaling
from vllm_metal.patches.mlx_patches.replacing import wrap
from vllm_metal.patches.mlx_patches.seam import (
    AttendingCache,
    Compression,
    EntryBlocks,
    Scoring,
)

#: Names of what mlx-lm's layers share in a forward.
_ENTRIES, _INDEX, _CHOSEN, _BLOCKS = "compress_kv", "index_k", "topk_idx", "candidates"
#: Prefix of the text model's names in what mlx-vlm converts.
_OF_MLX_VLM = "language_model."
_OF_IMAGES = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
_MOST_SLOTS = 4  # of an entry, if its group has as many positions


class EntryRows:
    """Stands for a cache that only the pool has; mlx-lm's `LayerCache` holds a layer's rows."""


class _Groups(NamedTuple):
    """Replaces a dense cache while entries are computed of the rows of whole groups."""

    kv: mx.array  # [E, size, D] float32, as `gate`
    gate: mx.array


def deepseek_v41(module: ModuleType) -> None:
    """Patches the arguments, the caches and the attention."""
    _nest_arguments(module)
    engram.add_memory(module)
    wrap(module.Model, "sanitize", _reading_names)
    module.Model.tower_tensors = _OF_IMAGES
    wrap(module.TextArgs, "__post_init__", partial(_checking, module._shared_reads))
    wrap(module.Attention, "__init__", _keeping_arguments)
    wrap(module.Attention, "__call__", partial(_attending, module))
    wrap(module.Compressor, "__call__", _pooling)
    wrap(module.TextModel, "__call__", partial(_with_rows, module))
    wrap(module.TextModel, "make_cache", _making_caches)


def _nest_arguments(module: Any) -> None:
    """Makes arguments with the text's keys in `text_config`, as published, and as others have them.

    Keys of a config.json that has none are the text's.
    """
    text: Any = engram.arguments(module.ModelArgs)

    @dataclass
    class ModelArgs(BaseModelArgs):
        model_type: str = "deepseek_v41"
        text_config: dict[str, Any] | None = None

        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> Any:
            nested = "text_config" in params
            return super().from_dict(params if nested else {"text_config": params})

        def __post_init__(self) -> None:
            self.text = text.from_dict(self.text_config or {})

    def with_text(before: Callable[..., None]) -> Callable[..., None]:
        return lambda self, args: before(self, args.text)

    ModelArgs.__module__ = text.__module__
    module.TextArgs, module.ModelArgs = text, ModelArgs
    wrap(module.Model, "__init__", with_text)


def _reading_names(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Reads names that mlx-vlm writes, which are nearly the published ones."""

    def sanitize(self: Any, weights: Arrays) -> Arrays:
        ends: Arrays = {}  # the embedding and the head, which MLX quantizes
        text: Arrays = {}
        for name, array in weights.items():
            if not name.startswith(_OF_MLX_VLM):
                continue
            name = name.removeprefix(_OF_MLX_VLM)
            if name.startswith(("embed_tokens.", "head.")):
                ends[f"lm_{name}" if name.startswith("head.") else f"model.{name}"] = array
            else:
                text[name.replace(".switch_mlp.", ".experts.switch_mlp.")] = array
        found: Arrays = before(self, text or weights) | ends
        return found

    return sanitize


def _checking(
    shared_reads: Callable[[Any, int], dict[str, int]], before: Callable[[Any], None]
) -> Callable[[Any], None]:
    def post_init(self: Any) -> None:
        _check(self)
        before(self)
        _check_sources(self, shared_reads)

    return post_init


def _check(args: Any) -> None:
    if not (isinstance(args.sliding_window, int) and args.sliding_window > 0):
        raise ValueError(
            f"sliding_window={args.sliding_window} of config.json is not supported: every layer "
            "attends to a window. Set a positive number"
        )
    if args.num_attention_heads % args.o_groups:
        raise ValueError(
            f"o_groups={args.o_groups} of config.json is not supported with "
            f"num_attention_heads={args.num_attention_heads}, which is no multiple of it"
        )
    check_scaling(args.rope_scaling or {})


def _check_sources(args: Any, shared_reads: Callable[[Any, int], dict[str, int]]) -> None:
    """Rejects layers whose entries, keys and choices would be of groups of different sizes."""
    ratios = [_ratio(args, layer) for layer in range(args.num_hidden_layers)]
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        if wrong := [layer for layer in getattr(args, key) if 0 in ratios[layer : layer + 1]]:
            raise ValueError(
                f"{key}={list(getattr(args, key))} of config.json is not supported: "
                f"compress_ratios has no groups for {wrong}. Choose another checkpoint"
            )
    for layer, ratio in enumerate(ratios):
        for source in shared_reads(args, layer).values():
            if ratios[source] != ratio:
                raise ValueError(
                    f"compress_ratios={list(args.compress_ratios)} of config.json is not "
                    f"supported: layer {layer} reads entries or choices of layer {source}, whose "
                    "groups have another size. Choose another checkpoint"
                )
    if _has_blocks(args) and _fewest_candidates(args) < args.index_topk:
        raise ValueError(
            f"candidate_topk_blocks={args.candidate_topk_blocks} of config.json is not supported "
            f"with candidate_block_size={args.candidate_block_size} and index_topk="
            f"{args.index_topk}: the blocks have fewer entries than a token attends to. Choose "
            "another checkpoint"
        )


def _ratio(args: Any, layer: int) -> int:
    return int(args.compress_ratios[layer]) if layer < len(args.compress_ratios) else 0


def _has_blocks(args: Any) -> bool:
    return bool(args.candidate_source_layer_id >= 0 and args.candidate_topk_blocks > 0)


def _fewest_candidates(args: Any) -> int:
    # The newest block may have a single entry.
    return int((args.candidate_topk_blocks - 1) * args.candidate_block_size + 1)


def _keeping_arguments(before: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, args: Any, layer_id: int) -> None:
        before(self, args, layer_id)
        # As an attribute of the object: a module's arrays and tuples are its parameters.
        object.__setattr__(self, "given", (args, layer_id))

    return init


def compression(layer: Any) -> Compression:
    """Returns how an attention layer stores and reads its context."""
    args, layer_id = layer.given
    layers = range(args.num_hidden_layers)
    sources = {_ratio(args, source) for source in args.kv_source_layer_ids if source in layers}
    kept = max(args.sliding_window, *sources) if sources else args.sliding_window
    slots = math.gcd(_MOST_SLOTS, *sources)
    blocks = None
    if _has_blocks(args) and layer.is_index_source and layer_id >= args.candidate_source_layer_id:
        blocks = EntryBlocks(args.candidate_block_size, args.candidate_topk_blocks)
    return Compression(
        args.sliding_window,
        kept,
        unit=-(-args.head_dim // slots),
        size=layer.ratio,
        topk=args.index_topk if layer.ratio else None,
        blocks=blocks,
        smallest=min(sources, default=1),
    )


def _making_caches(before: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def make_cache(self: Any) -> list[Any]:
        found = before(self)
        for layer, cache in zip(self.pipeline_layers, found, strict=True):
            attention, count = layer.self_attn, 1
            if attention.is_kv_source:  # entries, index keys, and rows of open groups
                count += 1 + attention.is_index_source + (attention.ratio > 1)
            cache.caches = (*(EntryRows() for _ in range(count)), *engram.states(layer))
        return found

    return make_cache


def _with_rows(module: Any, dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not (cache and isinstance(cache[0], tuple)):
            cache = cache or self.make_cache()
            engram.hand_tokens(cache, inputs)
            return dense(self, inputs, cache)
        hidden, args = self.embed_tokens(inputs), self.args
        shape = *hidden.shape[:2], args.hc_mult
        streams = mx.broadcast_to(hidden[:, :, None], (*shape, args.hidden_size))
        mix = mx.broadcast_to((mx.arange(args.hc_mult) == 0).astype(mx.float32), shape)
        positions, shared = cache[0][0].offset, dict[str, Any]({engram.TOKENS: inputs})
        for layer, caches in zip(self.pipeline_layers, cache, strict=True):
            streams, mix = layer(
                streams, mix, start_pos=positions, window_idx=None, cache=caches, shared=shared
            )
        normed: mx.array = self.norm(module._collapse(streams, mix))
        return normed

    return call


def _pooling(dense: Callable[..., Any]) -> Callable[..., Any]:
    def compress(self: Any, x: mx.array, start_pos: Any, cache: Any) -> Any:
        if not isinstance(groups := getattr(cache, "groups", None), _Groups):
            return dense(self, x, start_pos, cache)
        shares = mx.softmax(groups.gate, axis=1)
        latent = (groups.kv * shares).sum(axis=1, keepdims=True)
        return self.kv_norm(latent.astype(x.dtype)), start_pos // self.ratio

    return compress


class _Computed:
    """Takes the place of a dense cache, to which mlx-lm's layer appends new entries."""

    def __init__(self, groups: _Groups | None) -> None:
        self.groups = groups
        self.compress_kv: Any = None
        self.index_k: Any = None


def _attending(module: Any, dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    rotate = module._apply_rope

    def attention(
        self: Any, x: mx.array, *, start_pos: Any, window_idx: Any, cache: Any, shared: Any
    ) -> mx.array:
        if not isinstance(cache, tuple):
            return dense(
                self, x, start_pos=start_pos, window_idx=window_idx, cache=cache, shared=shared
            )
        keys, *others = cache
        by, rope = compression(self), {"rope": self.rope, "rope_dim": self.rope_dim}
        normed = self.q_a_norm(self.q_a_proj(x))
        queries = mx.unflatten(self.q_b_proj(normed), -1, (self.num_heads, self.head_dim))
        queries = rotate(queries, offset=start_pos, **rope).swapaxes(1, 2)
        rows = rotate(self.kv_norm(self.kv_proj(x)), offset=start_pos, **rope)
        rows = module._fake_quant_fp8(rows, 32)
        index = None
        if self.ratio and self.is_kv_source:
            index = _write(self, x, start_pos, others, shared, by)
        if self.ratio and self.is_index_source and _INDEX in shared:
            asked = _asked(module, self.indexer, x, normed, rope | {"offset": start_pos})
            limits = None if self.indexer.is_candidate_source else shared.get(_BLOCKS)
            shared[_CHOSEN] = shared[_INDEX].choose_entries(index, *asked, by, limits)
            if self.indexer.is_candidate_source and by.blocks is not None:
                shared[_BLOCKS] = shared[_CHOSEN]
        entries = shared.get(_ENTRIES) if self.ratio and _CHOSEN in shared else None
        chosen = None if entries is None else shared[_CHOSEN]
        scoring = Scoring(self.head_dim**-0.5, self.sinks)
        # In float32, as the dense forward.
        given = queries.astype(mx.float32), rows[:, None], by, scoring, entries, chosen
        out = keys.attend_to_entries(*given).astype(x.dtype).swapaxes(1, 2)
        out = rotate(out, offset=start_pos, inverse=True, **rope)
        batch, length, _ = x.shape
        out = self.o_a_proj(out.reshape(batch * length, self.o_groups, 1, -1), self._group_ids)
        projected: mx.array = self.o_b_proj(out.reshape(batch, length, -1))
        return projected

    return attention


def _write(
    layer: Any, x: mx.array, positions: mx.array, caches: list[Any], shared: Any, by: Compression
) -> mx.array | None:
    """Writes a layer's entries of the groups that [T, 1, hidden] rows end.

    Returns:
        [E, D] index keys of these groups; None: the layer has no indexer.
    """
    entries, *others = caches
    groups, firsts = None, positions
    if by.size > 1:
        *others, of_groups = others
        groups, firsts = write_groups(layer.compressor, x, of_groups, by)
    computed = _Computed(groups)
    layer._compress(x, start_pos=firsts, cache=computed, shared={})
    entries.write_entries(computed.compress_kv[:, 0].astype(x.dtype), by)
    shared[_ENTRIES] = entries
    if not others:
        return None
    (shared[_INDEX],) = others
    keys: mx.array = computed.index_k[:, 0].astype(x.dtype)
    return keys


def write_groups(
    compressor: Any, x: mx.array, cache: AttendingCache, by: Compression
) -> tuple[_Groups, mx.array]:
    """Writes rows of [T, 1, hidden] and reads those of the groups that may end.

    They are float32 in the dense cache; here two rows of the pool's dtype add up to one.
    """
    hidden = x.astype(mx.float32)
    rows = mx.concatenate([compressor.kv_proj(hidden), compressor.gate_proj(hidden)], axis=-1)
    if x.dtype == mx.float32:
        found, firsts = cache.write_groups(rows[:, None], by)
    else:
        rounded = rows.astype(x.dtype)
        parts = [rounded, (rows - rounded).astype(x.dtype)]
        found, firsts = cache.write_groups(mx.concatenate(parts, axis=-1)[:, None], by)
        rounded, rest = mx.split(found.astype(mx.float32), 2, axis=-1)
        found = rounded + rest
    return _Groups(*mx.split(found, 2, axis=-1)), firsts


def _asked(
    module: Any, indexer: Any, x: mx.array, normed: mx.array, rope: dict[str, Any]
) -> tuple[mx.array, mx.array]:
    """Returns an indexer's [T, H, 1, D] queries and [T, 1, H] weights, scales included."""
    heads, size = indexer.num_heads, indexer.head_dim
    queries = mx.unflatten(indexer.q_b_proj(normed), -1, (heads, size))
    queries = module._fake_quant_fp4(module._apply_rope(queries, **rope), block_size=32)
    weights = indexer.weights_proj(x).astype(mx.float32) * (heads * size) ** -0.5
    return queries.swapaxes(1, 2), weights
