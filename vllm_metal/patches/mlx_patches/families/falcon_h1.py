# SPDX-License-Identifier: Apache-2.0
"""Applies Falcon-H1's multipliers and groups of the norm that mlx-lm's module leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, converted
from vllm_metal.patches.mlx_patches.replacing import after_init

_CONVOLUTION = "model.layers.0.mamba.conv1d.weight"

# mlx-lm multiplies the weights of a published folder by most multipliers when it loads it. It
# leaves out `key_multiplier`, those of the value projection and of biases, and the groups of the
# norm (transformers' `FalconH1Attention`, `FalconH1Mixer`, `FalconH1RMSNormGated`).


def falcon_h1(module: ModuleType) -> None:
    def multiply_scores(layer: Any, args: Any) -> None:
        # A factor of the keys is one of the scores, since rotation is linear; so this also works
        # for folders converted by mlx-lm.
        layer.scale *= args.key_multiplier

    def normed(self: Any, hidden_states: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and not self.norm_before_gate:
            hidden_states = nn.silu(gate) * hidden_states
        grouped = mx.unflatten(hidden_states, -1, (self.n_groups, -1))
        scaled = mx.fast.rms_norm(grouped, None, self.variance_epsilon).flatten(-2) * self.weight
        return scaled if gate is None or not self.norm_before_gate else nn.silu(gate) * scaled

    after_init(module.FalconH1Attention, multiply_scores)
    converted(_multiply)(module)
    module.FalconH1RMSNormGated.__call__ = normed


def _multiply(model: Any, weights: Arrays) -> Arrays:
    convolution = weights[_CONVOLUTION]
    published = convolution.shape[-1] > convolution.shape[1]  # mlx-lm's own test
    for key, suffix, factor in _missing_factors(model):
        for name in [name for name in weights if name.endswith(suffix)]:
            if published:
                weights[name] = weights[name] * factor.astype(weights[name].dtype)
            elif not mx.all(factor == 1).item():
                raise ValueError(
                    f"{key} of config.json is not 1, and mlx-lm's conversion does not multiply "
                    f"{suffix} by it: serve the published checkpoint"
                )
    return weights


def _missing_factors(model: Any) -> Iterator[tuple[str, str, mx.array]]:
    """Yields multipliers that mlx-lm leaves out of some arrays: key, arrays' suffix, value."""
    args = model.args
    factors = (
        ("attention_in_multiplier", "self_attn.v_proj.weight", args.attention_in_multiplier),
        ("attention_out_multiplier", "self_attn.o_proj.bias", args.attention_out_multiplier),
        ("ssm_out_multiplier", "mamba.out_proj.bias", args.ssm_out_multiplier),
        ("mlp_multipliers", "feed_forward.gate_proj.bias", args.mlp_multipliers[0]),
        ("mlp_multipliers", "feed_forward.down_proj.bias", args.mlp_multipliers[1]),
    )
    for key, suffix, factor in factors:
        yield key, suffix, mx.array(factor)
    yield "ssm_multipliers", "mamba.in_proj.bias", model.model._mup_vector
