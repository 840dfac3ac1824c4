# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches compute MiniMax M3's sparse attention, and reads its keys as transformers does.

mlx-lm's module masks all rows by the length of a whole batch, and it reads and sets the arrays of
its caches. A paged cache gets the indexer's keys and queries, chooses the blocks of each row by its
own context, and attends to these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.forwards import heads, joined
from vllm_metal.patches.mlx_patches.replacing import wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, BlockChoice

_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_NAME, _LAYERS = "sparse_attention_config", "sparse_attention_freq"
#: Keys of `sparse_attention_config` that mlx-lm's module reads.
_READ = frozenset(
    (
        *(_LAYERS, "sparse_block_size", "sparse_index_dim", "sparse_local_block"),
        *("sparse_num_index_heads", "sparse_topk_blocks"),
    )
)
#: The others, with the values that transformers' class computes.
_COMPUTED = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
_VALUELESS = "sparse_disable_index_value"


def minimax_m3_vl(module: ModuleType) -> None:
    base: Any = module.TextArgs

    @dataclass
    class TextArgs(base):
        def __post_init__(self) -> None:
            stated = self.sparse_attention_config or {}
            if self.sparse_attention_freq is not None:  # which transformers does not read
                raise ValueError(
                    f"{_LAYERS} of config.json is not supported outside {_NAME}: transformers "
                    "does not read it there. Remove it"
                )
            super().__post_init__()
            _check_values(stated)
            self.layer_types = _layer_types(self)
            if _SPARSE in self.layer_types:
                _check_indexer(self)

    module.TextArgs = TextArgs  # type: ignore[attr-defined]
    module.Model.tower_tensors = ("patch_merge_mlp.",)
    wrap(module.Attention, "__call__", _attending)


def _layer_types(args: Any) -> list[str]:
    """Returns the layers' kinds as `MiniMaxM3VLTextConfig` of transformers derives them."""
    kinds, sparse = args.layer_types, args.sparse_attention_freq
    if kinds is None and sparse is not None:
        kinds = [_SPARSE if each else _FULL for each in sparse]
    kinds = kinds or [_FULL] * args.num_hidden_layers
    if len(kinds) != args.num_hidden_layers or not {*kinds} <= {_FULL, _SPARSE}:
        raise ValueError(
            f"layer_types={kinds} of config.json (or sparse_attention_freq) is not supported: "
            f"expected {_FULL!r} or {_SPARSE!r} for each of {args.num_hidden_layers} layers"
        )
    return list(kinds)


def _check_values(stated: Mapping[str, Any]) -> None:
    for key, value in stated.items():
        if key in _COMPUTED and value != _COMPUTED[key]:
            raise ValueError(_refusal(key, value, f"the module computes {_COMPUTED[key]!r}"))
        if key not in {*_READ, *_COMPUTED, _VALUELESS}:
            raise ValueError(_refusal(key, value, "the module does not read it"))
    sparse = stated.get(_LAYERS) or ()
    without = stated.get(_VALUELESS, sparse)
    if any(each and not off for each, off in zip(sparse, without, strict=False)):
        raise ValueError(_refusal(_VALUELESS, without, "the module's indexers have no values"))


def _refusal(key: str, value: Any, reason: str) -> str:
    return (
        f"{_NAME}.{key}={value!r} of config.json is not supported with mlx-lm's module "
        f"'minimax_m3_vl': {reason}. Choose another checkpoint"
    )


def _check_indexer(args: Any) -> None:
    groups = sorted((args.index_n_heads, args.num_key_value_heads))
    if groups[1] % groups[0] or args.num_attention_heads % groups[1]:
        raise ValueError(
            f"index_n_heads={args.index_n_heads} of config.json is not supported with "
            f"num_attention_heads={args.num_attention_heads} and "
            f"num_key_value_heads={args.num_key_value_heads}: one must be a multiple of the other"
        )
    if not 0 <= args.index_local_blocks <= args.index_topk_blocks:
        raise ValueError(
            f"index_local_blocks={args.index_local_blocks} of config.json is not supported with "
            f"index_topk_blocks={args.index_topk_blocks}: local blocks are among the chosen ones"
        )
    if args.index_head_dim < args.rotary_dim:
        raise ValueError(
            f"index_head_dim={args.index_head_dim} of config.json is not supported with "
            f"{args.rotary_dim} rotated elements of a head: an indexer rotates as many"
        )


def _attending(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], AttendingCache) or not self.is_sparse_attn:
            return dense(self, x, mask, cache)
        own = cache[0]
        queries, keys, values = heads(self, x, self.head_dim)
        if self.use_qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = self.rope(queries, own.offset), self.rope(keys, own.offset)
        own.update_and_fetch(keys, values)
        chosen = _chosen(self, x, cache[1])
        out = own.attend_to_blocks(queries, self.scale, chosen)
        projected: mx.array = self.o_proj(joined(out))
        return projected

    return attention


def _chosen(layer: Any, x: mx.array, cache: AttendingCache) -> Any:
    (queries,) = heads(layer, x, layer.index_head_dim, ("index_q_proj",))
    (keys,) = heads(layer, x, layer.index_head_dim, ("index_k_proj",))
    queries = layer.index_rope(layer.index_q_norm(queries), cache.offset)
    keys = layer.index_rope(layer.index_k_norm(keys), cache.offset)
    blocks = BlockChoice(layer.index_block_size, layer.index_topk_blocks, layer.index_local_blocks)
    return cache.choose(keys, queries, None, blocks)
