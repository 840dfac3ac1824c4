# SPDX-License-Identifier: Apache-2.0
"""Computes YaRN, LongRoPE, and positions of GPT-BigCode and Ernie 4.5 VL as transformers does.

mlx-lm always rounds YaRN's range of rotated pairs outwards; gpt-oss was trained without rounding
(`truncate`). It drops `attention_factor` (transformers' `_compute_yarn_parameters`). It only reads
LongRoPE's factors for long contexts. Its GPT-BigCode module counts from the cache length of a
single text.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils as module_of_ropes

from vllm_metal.patches.mlx_patches.families.forwards import attend, heads, offset_of, through
from vllm_metal.patches.mlx_patches.replacing import after_init, spread, wrap

_NAME = "initialize_rope"
_YARN = ("yarn", "deepseek_yarn")
_LONG = ("longrope", "su")


def rope_utils(module: ModuleType) -> None:
    """Patches `initialize_rope`, dynamic RoPE, and LongRoPE's class to keep its arguments."""
    wrap(module.SuScaledRoPE, "__init__", _keep_arguments)
    wrap(module.DynamicNTKScalingRoPE, "__call__", _rotate_rows)
    before = getattr(module, _NAME)

    @functools.wraps(before)
    def initialize_rope(
        dims: int,
        base: float,
        traditional: bool,
        scaling_config: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
    ) -> Any:
        scaling = scaling_config or {}
        rope_type = scaling.get("type") or scaling.get("rope_type")
        if traditional and rope_type in _LONG:
            raise ValueError(
                f"rope_type={rope_type!r} is not supported with rotation of neighboring pairs. "
                "Choose another checkpoint"
            )
        rope = before(dims, base, traditional, scaling_config, max_position_embeddings)
        if rope_type in _YARN:
            if scaling.get("truncate") is False:
                rope._freqs = _frequencies(dims, base, scaling)
            if scaling.get("attention_factor") is not None:
                rope.mscale = scaling["attention_factor"]
        return rope

    setattr(module, _NAME, initialize_rope)


def _keep_arguments(before: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(before)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        given = signature.bind(None, *args, **kwargs)
        given.apply_defaults()
        # A namespace, because the module would register a container's content as its own modules.
        self.given = SimpleNamespace(**given.arguments)

    return init


def _rotate_rows(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wraps dynamic RoPE to take an array of positions, all within the trained context."""

    def call(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, mx.array):
            return before(self, x, offset)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=1.0,
            offset=offset,
        )

    return call


def spread_ropes() -> None:
    """Replaces `initialize_rope` in mlx-lm's modules that have imported it; idempotent."""
    if original := getattr(module_of_ropes.initialize_rope, "__wrapped__", None):
        spread(_NAME, original, module_of_ropes.initialize_rope)


def _frequencies(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Returns YaRN's [dims / 2] wavelengths / 2 pi, between those of trained and longer context."""
    # Peng et al. 2023, arXiv:2309.00071, section 3.2, with an unrounded range.
    trained = scaling.get("original_max_position_embeddings", 4096)

    def pair(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(pair(scaling.get("beta_fast") or 32), 0)
    high = min(pair(scaling.get("beta_slow") or 1), dims - 1)
    ramp = (mx.arange(dims // 2, dtype=mx.float32) - low) / ((high - low) or 0.001)
    longer = mx.clip(ramp, 0, 1)
    freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return freqs / (longer / scaling["factor"] + 1 - longer)


def gpt_bigcode(module: ModuleType) -> None:
    """Patches the model's forward, so that each text of a batch may start at another position."""

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        offset = offset_of(None if cache is None else cache[0])
        positions = mx.arange(inputs.shape[1]) + mx.array(offset)[..., None]
        return through(self.h, self.wte(inputs) + self.wpe(positions), cache, self.ln_f)

    module.GPTBigCodeModel.__call__ = forward


def ernie4_5_moe_vl(module: ModuleType) -> None:
    """Patches attention to rotate by one position per token: text has the same on all axes."""

    def add_rope(layer: Any, args: Any) -> None:
        layer.rope = nn.RoPE(layer.head_dim, traditional=True, base=args.rope_theta)

    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **_: Any) -> Any:
        queries, keys, values = heads(self, x, self.head_dim)
        offset = offset_of(cache)
        queries, keys = (self.rope(each, offset=offset) for each in (queries, keys))
        return attend(queries, keys, values, self.scale, cache, mask, self.o_proj)

    after_init(module.Attention, add_rope)
    module.Attention.__call__ = attention
