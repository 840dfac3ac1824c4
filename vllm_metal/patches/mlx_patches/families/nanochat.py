# SPDX-License-Identifier: Apache-2.0
"""Matches transformers' nanochat: array names, the cap of logits and the epsilon of norms.

mlx-lm's module uses the training code's names, a cap of 15 and 1e-5. Folders with its own names,
whose configuration has neither key, keep both.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.forwards import attend, heads, offset_of, through
from vllm_metal.patches.mlx_patches.replacing import after_init

#: Parts of names in transformers' files, and in mlx-lm's module.
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
    """Patches the forward around mlx-lm's projections."""
    base: Any = module.ModelArgs

    @dataclass
    class ModelArgs(base):
        rms_norm_eps: float = 1e-5
        final_logit_softcapping: float | None = 15.0

    module.ModelArgs = ModelArgs  # type: ignore[attr-defined]

    def keep_epsilon(layer: Any, args: Any) -> None:
        layer.eps = args.rms_norm_eps

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        def positioned(rows: mx.array) -> mx.array:
            rotated = module.apply_rotary_emb(rows, offset=offset_of(cache), freqs=self._rope_freqs)
            return mx.fast.rms_norm(rotated, None, self.eps)

        queries, keys, values = heads(self, x, self.head_dim, ("c_q", "c_k", "c_v"))
        queries, keys = positioned(queries), positioned(keys)
        return attend(queries, keys, values, self.scale, cache, mask, self.c_proj)

    def block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        hidden = x + self.attn(mx.fast.rms_norm(x, None, self.attn.eps), mask=mask, cache=cache)
        out: mx.array = hidden + self.mlp(mx.fast.rms_norm(hidden, None, self.attn.eps))
        return out

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        eps = self.args.rms_norm_eps

        def norm(hidden: mx.array) -> mx.array:
            return mx.fast.rms_norm(hidden, None, eps)

        return through(self.h, norm(self.wte(inputs)), cache, norm)

    def capped(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.lm_head(self.transformer(inputs, cache=cache))
        cap = self.args.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits

    after_init(module.Attention, keep_epsilon)
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
