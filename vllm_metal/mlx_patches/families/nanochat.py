# SPDX-License-Identifier: Apache-2.0
"""nanochat as transformers has it: names of arrays, the cap of logits, what norms add to a mean.

mlx-lm's module has names of the training code's, a cap of 15 and 1e-5. It keeps both for folders
under its own names, whose configuration has neither key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from vllm_metal.mlx_patches.families.attention import attend, joined
from vllm_metal.mlx_patches.patch import replace_method

#: Parts of names, in transformers' files and in mlx-lm's module.
_PARTS = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "h",
    "self_attn": "attn",
    "q_proj": "c_q",
    "k_proj": "c_k",
    "v_proj": "c_v",
    "o_proj": "c_proj",
    "fc1": "c_fc",
    "fc2": "c_proj",
}


def nanochat(module: ModuleType) -> None:
    """The forward around mlx-lm's projections."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        rms_norm_eps: float = 1e-5
        final_logit_softcapping: float | None = 15.0

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any) -> None:
            before(self, args)
            self.eps = args.rms_norm_eps

        return init

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = 0 if cache is None else cache.offset

        def heads(projection: nn.Module, count: int) -> mx.array:
            projected: mx.array = projection(x)
            return mx.unflatten(projected, -1, (count, self.head_dim)).swapaxes(1, 2)

        def positioned(rows: mx.array) -> mx.array:
            turned = module.apply_rotary_emb(rows, offset=offset, freqs=self._rope_freqs)
            return mx.fast.rms_norm(turned, None, self.eps)

        queries = positioned(heads(self.c_q, self.num_heads))
        keys = positioned(heads(self.c_k, self.num_kv_heads))
        values = heads(self.c_v, self.num_kv_heads)
        out: mx.array = self.c_proj(joined(attend(queries, keys, values, self.scale, cache, mask)))
        return out

    def block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        hidden = x + self.attn(mx.fast.rms_norm(x, None, self.attn.eps), mask=mask, cache=cache)
        out: mx.array = hidden + self.mlp(mx.fast.rms_norm(hidden, None, self.attn.eps))
        return out

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        eps = self.args.rms_norm_eps
        hidden = mx.fast.rms_norm(self.wte(inputs), None, eps)
        caches = [None] * len(self.h) if cache is None else cache
        mask = create_attention_mask(hidden, caches[0])
        for layer, of_layer in zip(self.h, caches, strict=True):
            hidden = layer(hidden, mask=mask, cache=of_layer)
        return mx.fast.rms_norm(hidden, None, eps)

    def capped(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.lm_head(self.transformer(inputs, cache=cache))
        cap = self.args.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits

    replace_method(module.Attention, "__init__", built)
    module.Attention.__call__ = call
    module.TransformerBlock.__call__ = block
    module.NanoChatModel.__call__ = forward
    module.Model.__call__ = capped
    module.Model.sanitize = _sanitize


def _sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {
        ".".join(_PARTS.get(part, part) for part in name.split(".")): array
        for name, array in weights.items()
    }
