# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's GPU-only kernels in MLX's operations."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import bitlinear_layers, muse_spark


def install(monkeypatch) -> None:
    """Replaces the kernels."""
    for double in (
        qk_norm,
        qk_norm_rope,
        expert_routing,
        rms_norm_sigmoid_gate,
        post_expert_norm_combine,
        norm_add_norm,
    ):
        monkeypatch.setattr(muse_spark, double.__name__, double)
    monkeypatch.setattr(bitlinear_layers.BitLinear, "execute_matmul_kernel", ternary)


def ternary(self, x, packed):
    """Multiplies by weights -1, 0, 1 in two bits, packed from the four quarters of the rows."""
    parts = [((packed >> shift) & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
    scale = 1 / self.weight_scale if self.invert_weight_scales else self.weight_scale
    return (x @ mx.concatenate(parts).T) * scale


def qk_norm(qkvg, *, n_heads, n_kv_heads, head_dim, eps, query_scale):
    width = (n_heads + n_kv_heads) * head_dim
    heads = mx.unflatten(qkvg[..., :width], -1, (-1, head_dim))
    heads = mx.fast.rms_norm(heads, None, eps)
    return heads[..., :n_heads, :] * query_scale, heads[..., n_heads:, :]


def qk_norm_rope(qkvg, *, head_dim, rope_base, offset, **norm):
    rotated = (
        mx.fast.rope(
            heads.swapaxes(1, 2),
            head_dim,
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        )
        for heads in qk_norm(qkvg, head_dim=head_dim, **norm)
    )
    return [heads.swapaxes(1, 2) for heads in rotated]


def expert_routing(logits, expert_bias, *, top_k, multiplier, score_eps, route_scale):
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / (weights.sum(-1, keepdims=True) + score_eps) * route_scale


def rms_norm_sigmoid_gate(x, gate, *, eps):
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).flatten(2)
    return normed * mx.sigmoid(gate)


def post_expert_norm_combine(experts, weights, *, norm_weight, eps):
    # The sum of squares is over products with the weight, as in InputScaleRMSNorm.
    normed = mx.fast.rms_norm(experts * norm_weight, None, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def norm_add_norm(branch, stream, *, alpha, beta, post_weight, post_eps, next_norm):
    scaled = branch if post_weight is None else branch * post_weight
    normed = mx.fast.rms_norm(scaled.astype(mx.float32), None, post_eps)
    added = alpha * stream.astype(mx.float32) + beta * normed
    after = None if next_norm is None else next_norm(added).astype(branch.dtype)
    return added, after
