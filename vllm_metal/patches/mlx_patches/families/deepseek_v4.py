# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve DeepSeek V4, whose attention mlx-vlm computes over dense caches.

A layer attends to a window of positions, and most layers to compressed entries beside it: one for
each group of positions, all of them (groups of 128) or those that an indexer chooses (groups of 4,
each computed from the group before, too). A paged cache gets the rows of which entries are
computed, and returns those of the groups that a step touches; see `Compression`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families import arrays
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Compression, Scoring

#: Names of the dense caches of keys, and of entries.
KEYS_CACHE, ENTRIES_CACHE = "KeyRowsCache", "PoolingCache"
_SIZES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
#: Size of groups whose entries are computed from the group before, too.
_OVERLAPPING = 4
_NOT_OF_SCALING = ("rope_theta", "partial_rotary_factor")
#: Parameters of YaRN that the module reads, and one with a single value.
_OF_YARN = (
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    "attention_factor",
)
#: Names of arrays that transformers writes in other words than the published files.
_NAMES = (
    (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
    (re.compile(r"\.hc_head\.hc_"), ".hc_head."),
)


def config(module: ModuleType) -> None:
    """Reads the keys that transformers writes for those of the published files."""
    base: Any = module.ModelConfig

    @dataclass
    class ModelConfig(base):
        layer_types: list[str] | None = None
        compress_rates: dict[str, int] | None = None
        mlp_layer_types: list[str] | None = None
        partial_rotary_factor: float | None = None
        rope_parameters: dict[str, Any] | None = None

        def __post_init__(self) -> None:
            _read_rope(self)
            _check_sizes(self.compress_rates or {})
            if self.layer_types:
                self.compress_ratios = [_SIZES[kind] for kind in self.layer_types]
            elif not self.compress_ratios:  # as `DeepseekV4Config` of transformers derives them
                later = range(self.num_hidden_layers - 2)
                self.compress_ratios = [128, 128, *(4 if index % 2 else 128 for index in later)]
            if self.mlp_layer_types:
                self.num_hash_layers = _num_hashed(self.mlp_layer_types)
            if not (isinstance(self.sliding_window, int) and self.sliding_window > 0):
                raise ValueError(
                    f"sliding_window={self.sliding_window} of config.json is not supported: every "
                    "layer attends to a window. Set a positive number"
                )
            if self.num_attention_heads % self.o_groups:
                raise ValueError(
                    f"o_groups={self.o_groups} of config.json is not supported with "
                    f"num_attention_heads={self.num_attention_heads}, which is no multiple of it"
                )
            if self.swiglu_limit <= 0:  # no limit in the module, zeros in transformers'
                raise ValueError(
                    f"swiglu_limit={self.swiglu_limit} of config.json is not supported: "
                    "implementations disagree on its meaning. Set a positive limit"
                )
            super().__post_init__()

    ModelConfig.__module__ = base.__module__
    module.ModelConfig = ModelConfig  # type: ignore[attr-defined]


def _read_rope(args: Any) -> None:
    """Sets the keys of published files from `rope_parameters`, as transformers nests them.

    Layers without entries rotate by the parameters "main", all others by "compress".
    """
    given = args.rope_parameters or {}
    of_entries = given.get("compress") or {k: v for k, v in given.items() if k != "main"}
    main = given.get("main") or {}
    if (rope_type := main.get("rope_type", "default")) != "default":
        raise ValueError(
            f"rope_type={rope_type!r} in rope_parameters.main of config.json is not supported: the "
            "module scales no positions in layers without entries. Choose another checkpoint"
        )
    args.rope_theta = main.get("rope_theta", args.rope_theta)
    if given.get("compress"):
        args.compress_rope_theta = of_entries.get("rope_theta", args.compress_rope_theta)
    scaled = {k: v for k, v in of_entries.items() if k not in _NOT_OF_SCALING}
    if scaled.get("rope_type", "default") != "default":
        # transformers derives another factor in parameters that it has nested, only there.
        args.rope_scaling = {"attention_factor": None, **scaled} if "compress" in given else scaled
    check_scaling(args.rope_scaling or {})
    share = of_entries.get("partial_rotary_factor", args.partial_rotary_factor)
    if share is not None:
        args.qk_rope_head_dim = int(args.head_dim * share)
    if main.get("partial_rotary_factor", share) != share:
        raise ValueError(
            f"partial_rotary_factor={main['partial_rotary_factor']} in rope_parameters.main of "
            f"config.json is not supported with {share} elsewhere: the module has one. Choose "
            "another checkpoint"
        )


def check_scaling(scaling: Mapping[str, Any]) -> None:
    """Raises ValueError unless the keys are those of YaRN that the modules read."""
    types = ("rope_type", "type")
    for key, value in sorted(scaling.items(), key=lambda item: item[0] not in types):
        if key in types:
            wrong = value not in ("default", "yarn")
        else:
            wrong = key not in _OF_YARN or (key == "attention_factor" and value != 1.0)
        if wrong:
            raise ValueError(
                f"{key}={value!r} in rope_parameters or rope_scaling of config.json is not "
                "supported: the module scales by YaRN, with attention_factor=1.0. Choose another "
                "checkpoint"
            )


def _check_sizes(rates: Mapping[str, int]) -> None:
    for kind, size in rates.items():
        if _SIZES.get(kind) != size:
            raise ValueError(
                f"compress_rates={dict(rates)} of config.json is not supported: the module "
                f"computes {_SIZES}. Choose another checkpoint"
            )


def _num_hashed(kinds: list[str]) -> int:
    count = kinds.count("hash_moe")
    if kinds != ["hash_moe"] * count + ["moe"] * (len(kinds) - count):
        raise ValueError(
            f"mlp_layer_types={kinds} of config.json is not supported: expected 'hash_moe' for the "
            "first layers, and 'moe' for all others. Choose another checkpoint"
        )
    return count


def names(module: ModuleType) -> None:
    """Renames what transformers writes in other words than the published files."""

    def rename(name: str) -> str:
        for pattern, replacement in _NAMES:
            name = pattern.sub(replacement, name)
        return name

    arrays.renamed(rename)(module)


def language(module: ModuleType) -> None:
    """Lets caches attend, and keep and read the rows of groups."""
    wrap(module.LocalAttention, "__call__", _attending)
    dense: Any = module.RotatingKVCache
    # A name by which the keys' caches are known from those of other attention.
    keys_cache: Any = type(KEYS_CACHE, (dense,), {"__module__": dense.__module__})

    def make_cache(self: Any) -> list[Any]:
        def caches(layer: Any) -> Any:
            keys = keys_cache(self.args.sliding_window)
            size = layer.attn.compress_ratio
            if not size:
                return keys
            # Those of entries, of the indexer's, and one that only a paged cache needs.
            count = 3 if "indexer" in layer.attn else 2
            return module.CacheList(keys, *(module.PoolingCache(size) for _ in range(count)))

        return [caches(layer) for layer in self.layers]

    module.LanguageModel.make_cache = make_cache
    wrap(module.LanguageModel, "__call__", _with_caches)
    wrap(module.Compressor, "__call__", _remembering)
    after_init(module.Indexer, _score_all)


def _score_all(indexer: Any, *args: Any) -> None:
    """Scores all entries, as transformers does; the module scores means of blocks first."""
    indexer.index_block = 0


def _with_caches(before: Callable[..., Any]) -> Callable[..., Any]:
    """Gives whole texts caches: without them a token sees entries of later groups."""

    def call(self: Any, inputs: Any = None, cache: Any = None, **options: Any) -> Any:
        return before(self, inputs, self.make_cache() if cache is None else cache, **options)

    return call


def _remembering(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Keeps the last group of a call for the first entry of the next, which overlaps it."""

    def compress(self: Any, x: mx.array, cache: Any, offset: Any) -> mx.array:
        if not self.overlap:
            return before(self, x, cache, offset)
        kv, gate, first = cache.accumulate_windows(self.wkv(x), self.wgate(x), offset)
        found = mx.zeros((len(x), 0, self.head_dim), x.dtype)
        if kv.size:
            size, last = self.compress_ratio, getattr(cache, "last_group", None)
            cache.last_group = kv[:, -size:], gate[:, -size:]
            if last is None:  # a gate that gives the missing group's rows no weight
                last = mx.zeros_like(kv[:, :size]), mx.full(gate[:, :size].shape, -mx.inf)
            count = kv.shape[1] // size
            rows, gates = (
                _with_the_one_before(mx.concatenate(list(pair), axis=1), size)
                for pair in zip(last, (kv, gate), strict=True)
            )
            firsts = mx.array(first).reshape(-1, 1) + mx.arange(count) * size
            firsts = mx.broadcast_to(firsts, (len(x), count)).flatten()
            found = mx.unflatten(_entries(self, rows, gates, firsts, True), 0, (len(x), count))
        pooled: mx.array = cache.update_and_fetch(found)
        return pooled

    return compress


def _with_the_one_before(rows: mx.array, size: int) -> mx.array:
    """Returns [B * (n - 1), 2 * size, D] of [B, n * size, D] rows: each group but the first."""
    groups = mx.unflatten(rows, 1, (-1, size))
    return mx.concatenate([groups[:, :-1], groups[:, 1:]], axis=2).flatten(0, 1)


def compression(layer: Any) -> Compression:
    """Returns how an attention layer stores and reads its context."""
    args, size = layer.config, layer.compress_ratio
    needed = [2 * each if each == _OVERLAPPING else each for each in args.compress_ratios]
    kept = max(args.sliding_window, *needed)
    unit = -(-args.head_dim // _OVERLAPPING)
    topk = layer.indexer.index_topk if "indexer" in layer else None
    return Compression(args.sliding_window, kept, unit, size, size == _OVERLAPPING, topk)


def _attending(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        self: Any,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        position_offset: Any = None,
        causal: bool = False,
    ) -> mx.array:
        keys, *others = cache if isinstance(cache, tuple) else (cache,)
        if not isinstance(keys, AttendingCache):
            return dense(self, x, mask, cache, position_offset, causal)
        by, positions, count = compression(self), keys.offset, len(x)
        normed = self.q_norm(self.wq_a(x))
        queries = self.wq_b(normed).reshape(count, self.n_heads, 1, self.head_dim)
        queries = mx.fast.rms_norm(queries, None, self.config.rms_norm_eps)
        queries = self.rope(queries, positions)
        rows = self.rope(self.kv_norm(self.wkv(x))[:, None], positions)
        entries, chosen = None, None
        if by.size:
            entries, *of_index, groups = others
            parts = _group_rows(self, x)
            found, firsts = groups.write_groups(mx.concatenate(parts, axis=-1)[:, None], by)
            widths = [part.shape[-1] for part in parts]
            kv, gate, *index = mx.split(
                found, [sum(widths[: i + 1]) for i in range(len(widths))], -1
            )
            entries.write_entries(_entries(self.compressor, kv, gate, firsts, by.overlap), by)
            if of_index:
                chosen = _chosen(self, x, normed, positions, index[:2], firsts, of_index[0], by)
        scoring = Scoring(self.scale, self.attn_sink.astype(queries.dtype))
        out = keys.attend_to_entries(queries, rows, by, scoring, entries, chosen)
        out = self.rope(out, positions, inverse=True)
        out = self.wo_a(out.reshape(count, self.o_groups, 1, -1))
        projected: mx.array = self.wo_b(out.reshape(count, 1, -1))
        return projected

    return attention


def _group_rows(layer: Any, x: mx.array) -> list[mx.array]:
    """Returns what entries are computed of: values and gates, of [T, 1, hidden] rows.

    Rows of layers without an indexer are padded, so that whole numbers of them are as wide as one
    with: their layers can then share memory (`specs.kv_cache_specs`).
    """
    parts = [layer.compressor.wkv(x), layer.compressor.wgate(x)]
    if "indexer" in layer:
        compressor = layer.indexer.compressor
        return [*parts, compressor.wkv(x), compressor.wgate(x)]
    args, by = layer.config, compression(layer)
    if _OVERLAPPING in args.compress_ratios:
        width = 2 * args.head_dim
        largest = by.units_of(4 * (args.head_dim + args.index_head_dim))
        units = largest // (largest // by.units_of(width))
        missing = units * by.unit - width
        parts.append(mx.zeros((*x.shape[:2], missing), x.dtype))
    return parts


def _entries(
    compressor: Any, kv: mx.array, gate: mx.array, firsts: mx.array, overlap: bool
) -> mx.array:
    """Returns [E, D] entries of groups of [E, n, ...] values and gates that begin at [E] positions.

    As transformers' `DeepseekV4HCACompressor` and `DeepseekV4CSACompressor`.
    """
    gate = gate.astype(mx.float32)
    if not overlap:
        gate = gate + compressor.ape
    else:
        (before, own), (of_before, of_own) = (mx.split(each, 2, axis=1) for each in (gate, kv))
        before, _ = mx.split(before + compressor.ape, 2, axis=-1)
        _, own = mx.split(own + compressor.ape, 2, axis=-1)
        before = mx.where((firsts > 0)[:, None, None], before, -mx.inf)
        gate = mx.concatenate([before, own], axis=1)
        size = compressor.head_dim
        kv = mx.concatenate([of_before[..., :size], of_own[..., size:]], axis=1)
    shares = mx.softmax(gate, axis=1).astype(kv.dtype)
    found = compressor.norm((kv * shares).sum(axis=1))
    rotated: mx.array = compressor.rope(found[:, None, None], firsts)
    return rotated[:, 0, 0]


def _chosen(
    layer: Any,
    x: mx.array,
    normed: mx.array,
    positions: mx.array,
    parts: list[mx.array],
    firsts: mx.array,
    cache: AttendingCache,
    by: Compression,
) -> Any:
    indexer = layer.indexer
    kv, gate = parts
    entries = _entries(indexer.compressor, kv, gate, firsts, by.overlap)
    queries = indexer.wq_b(normed).reshape(len(x), indexer.n_heads, 1, indexer.head_dim)
    queries = layer.rope(queries, positions)
    weights = indexer.weights_proj(x).astype(mx.float32)
    weights = weights * (indexer.scale * indexer.n_heads**-0.5)
    return cache.choose_entries(entries, queries, weights, by)
