# SPDX-License-Identifier: Apache-2.0
"""Llama 4's text model: experts, norms where positions are, temperatures where they are not.

mlx-lm's module of this name knows dense models only. It normalises queries and keys of every layer,
and neither scales queries by their place in the text nor attends within chunks (transformers'
`Llama4TextAttention`). A text that is no longer than a chunk is one chunk; longer ones are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.llama4 import MoE

from vllm_metal.mlx_patches.families.attention import attend, joined, temperatures
from vllm_metal.mlx_patches.patch import replace_method

_JOINED = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"


def llama4_text(module: ModuleType) -> None:
    """All of them, and the name of the head."""
    module.ModelArgs = _arguments(module.ModelArgs)  # type: ignore[attr-defined]

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any) -> None:
            before(self, args)
            for index in set(args.moe_layers) & set(range(len(self.layers))):
                self.layers[index].feed_forward = MoE(args)

        return init

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = 0 if cache is None else cache.offset

        def heads(rows: mx.array, positioned: bool = True) -> mx.array:
            rows = mx.unflatten(rows, -1, (-1, self.head_dim)).swapaxes(1, 2)
            if not (positioned and self.use_rope):
                return rows
            rows = self.rope(rows, offset=offset)
            return mx.fast.rms_norm(rows, None, self.rms_norm_eps) if self.use_qk_norm else rows

        queries, keys = heads(self.q_proj(x)), heads(self.k_proj(x))
        values = heads(self.v_proj(x), positioned=False)
        if self.args.attn_temperature_tuning and not self.use_rope:
            args = self.args
            factors = temperatures(offset, x.shape[1], args.floor_scale, args.attn_scale)
            queries = (queries * factors).astype(queries.dtype)
        out: mx.array = self.o_proj(joined(attend(queries, keys, values, self.scale, cache, mask)))
        return out

    replace_method(module.LanguageModel, "__init__", built)
    module.Attention.__call__ = call
    module.Model.sanitize = _sanitize


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
                raise ValueError("num_experts_per_tok of config.json is not 1")
            in_chunks = self.layer_types is None or "chunked_attention" in self.layer_types
            chunk = self.attention_chunk_size
            if in_chunks and chunk and self.max_position_embeddings > chunk:
                longest = f'{{"max_position_embeddings": {chunk}}}'
                raise ValueError(
                    f"attention_chunk_size is {chunk}: attention within chunks of a longer text is "
                    f"not computed; --hf-overrides '{longest}' serves texts of one chunk"
                )

    return ModelArgs


def _sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Arrays under mlx-lm's names, each expert's rows as outputs."""
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        if name.endswith(_JOINED):
            gate, up = mx.split(array.swapaxes(-1, -2), 2, axis=-2)
            place = name.removesuffix(_JOINED) + ".experts"
            found |= {f"{place}.gate_proj.weight": gate, f"{place}.up_proj.weight": up}
        elif name.endswith(_DOWN):
            found[f"{name}.weight"] = array.swapaxes(-1, -2)
        elif name.startswith("lm_head."):
            if not self.tie_word_embeddings:
                found[name.replace("lm_head.", "output.", 1)] = array
        else:
            found[name] = array
    return found
