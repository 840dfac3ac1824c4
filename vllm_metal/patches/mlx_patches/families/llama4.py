# SPDX-License-Identifier: Apache-2.0
"""Serves Llama 4 for texts of one attention chunk, where a chunk is the whole context.

Most layers only see the chunk of `attention_chunk_size` positions that a token is in, for which the
pool has no block type. Texts longer than a chunk are rejected.

mlx-lm's module `llama4_text` of the text model knows dense models only. It normalizes queries and
keys in every layer, and neither scales queries by position nor attends within chunks (transformers'
`Llama4TextAttention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.forwards import attend, heads, offset_of, through
from vllm_metal.patches.mlx_patches.replacing import after_init

_JOINED = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


def llama4(module: ModuleType) -> None:
    """Gives layers the whole context, and scales queries by each row's position."""

    def make_cache(self: Any) -> list[Any]:
        return [KVCache() for _ in self.layers]

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        return through(self.layers, self.embed_tokens(inputs), cache, self.norm)

    module.Model.make_cache = make_cache
    module.LlamaModel.__call__ = forward
    module.Attention.__call__ = _attention


def llama4_text(module: ModuleType) -> None:
    """Adds experts, and fixes norms, temperatures and the head's name."""
    from mlx_lm.models.llama4 import MoE

    def add_experts(model: Any, args: Any) -> None:
        for index in set(args.moe_layers) & set(range(len(model.layers))):
            model.layers[index].feed_forward = MoE(args)

    module.ModelArgs = _arguments(module.ModelArgs)  # type: ignore[attr-defined]
    after_init(module.LanguageModel, add_experts)
    module.Attention.__call__ = _attention
    module.Model.sanitize = _sanitize


def _attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    settings = getattr(self, "args", self)  # one of the two has the temperature settings
    offset = offset_of(cache)
    queries, keys, values = heads(self, x, self.head_dim)
    # As in transformers: norms only in layers with positions, temperatures only in the others.
    if self.use_rope:
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if self.use_qk_norm:
            eps = getattr(self, "rms_norm_eps", 1e-6)
            queries, keys = (mx.fast.rms_norm(rows, None, eps) for rows in (queries, keys))
    elif settings.attn_temperature_tuning:
        # [B, 1, L, 1] or [1, 1, L, 1]; grows with every `floor_scale` tokens before a row.
        positions = mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(1, x.shape[1] + 1)[:, None]
        steps = mx.log1p(mx.floor(positions / settings.floor_scale))
        queries = (queries * (steps * settings.attn_scale + 1.0)).astype(queries.dtype)
    return attend(queries, keys, values, self.scale, cache, mask, self.o_proj)


def _arguments(base: Any) -> type:
    @dataclass
    class ModelArgs(base):
        moe_layers: list[int] | None = None
        interleave_moe_layer_step: int = 1
        num_local_experts: int = 0
        num_experts_per_tok: int = 1
        layer_types: list[str] | None = None
        max_position_embeddings: int = 131072
        attention_chunk_size: int | None = 8192
        attn_temperature_tuning: bool = True
        floor_scale: int = 8192
        attn_scale: float = 0.1

        def __post_init__(self) -> None:
            step = self.interleave_moe_layer_step
            if not self.num_local_experts or not step:
                self.moe_layers = []
            elif self.moe_layers is None:
                self.moe_layers = list(range(step - 1, self.num_hidden_layers, step))
            if self.moe_layers and self.num_experts_per_tok != 1:
                raise ValueError(
                    f"num_experts_per_tok={self.num_experts_per_tok} of config.json is not "
                    "supported: mlx-lm's module computes 1. Choose another checkpoint"
                )
            in_chunks = self.layer_types is None or "chunked_attention" in self.layer_types
            chunk = self.attention_chunk_size
            if in_chunks and chunk and self.max_position_embeddings > chunk:
                longest = f'{{"max_position_embeddings": {chunk}}}'
                raise ValueError(
                    f"attention_chunk_size={chunk} of config.json is supported only for texts of "
                    f"one chunk. Set --hf-overrides '{longest}'"
                )

    return ModelArgs


def _sanitize(self: Any, weights: Arrays) -> Arrays:
    """Renames arrays for mlx-lm, with each expert's rows as outputs."""
    found: Arrays = {}
    for name, array in weights.items():
        if name.endswith(_JOINED):
            gate, up = mx.split(array.swapaxes(-1, -2), 2, axis=-2)
            prefix = name.removesuffix(_JOINED) + ".experts"
            found |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith(_DOWN):
            found[f"{name}.weight"] = array.swapaxes(-1, -2)
        elif name.startswith("lm_head."):
            if not self.tie_word_embeddings:
                found[name.replace("lm_head.", "output.", 1)] = array
        else:
            found[name] = array
    return found
