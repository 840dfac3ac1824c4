# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches serve Inkling, whose attention mlx-vlm computes over a dense mask.

A layer has attention and four short convolutions: of K, of V, of attention's output and of the
MLP's. mlx-vlm keeps the inputs of all four in one cache beside K and V. In a step the decoder layer
is called once with all tokens as one sequence; attention then treats each token as a text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays, converted
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall
from vllm_metal.patches.mlx_patches.replacing import wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring

_CONVOLUTIONS = 4
#: In the names of their weights, which transformers keeps in float32 in a model of any dtype.
_CONVOLUTION = "_sconv."
#: Names of transformers' arrays, and the module's.
_NAMES = (
    (re.compile(r"^model\.(?:language_model\.)?"), "language_model.model."),
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"\.embed_tokens\.embed_norm\."), ".embed_norm."),
    (re.compile(r"_sconv\.conv1d\."), "_sconv.conv."),
    (re.compile(r"\.rel_logits_proj\.proj$"), ".rel_proj"),
    (re.compile(r"\.mlp\.gate\.weight$"), ".mlp.gate_weight"),
    (re.compile(r"\.mlp\.gate\."), ".mlp."),
    (re.compile(r"\.mlp\.experts\.down_proj$"), ".mlp.switch_mlp.down_proj.weight"),
    (re.compile(r"(\.shared_experts\.(?:gate|up|down)_proj)$"), r"\1.weight"),
)
_GATE_UP = ".mlp.experts.gate_up_proj"
#: Prefixes of names that Inkling's own checkpoints have, which the module reads itself.
_PUBLISHED = ("model.llm.", "model.visual.", "model.audio.", "model.mtp.")


class MaskedWindowCache(KVCache):
    """The dense cache of a layer that keeps the whole context and masks what its window hides."""

    def __init__(self, window: int) -> None:
        """`window`: positions that a query sees, its own included."""
        super().__init__()
        self.window = window


class ConvolvingCache(ABC):
    """Replaces a layer's cache of convolution inputs, if it keeps these per token."""

    # Attributes that the decoder layer reads for padded batches.
    lengths = None
    left_padding = None

    def advance(self, num_tokens: int) -> None:  # noqa: B027 - positions are the step's
        """No-op: the step tracks positions."""

    @abstractmethod
    def convolve(self, inputs: mx.array, apply: Callable[[mx.array], mx.array]) -> mx.array:
        """Stores the inputs of the layer's next convolution, and runs it over each request's.

        Args:
            inputs: [T, C], of this step's tokens.
            apply: maps [n, Q + taps - 1, C] inputs to [n, Q, D] outputs.

        Returns:
            [T, D].
        """


def language(module: ModuleType) -> None:
    """Lets caches attend and convolve, and creates caches that know the layers' windows."""
    wrap(module.InklingAttention, "__call__", _attend)
    wrap(module.InklingShortConvolution, "__call__", _convolve)
    wrap(module.InklingDenseMLP, "__call__", _in_its_dtype)
    module.InklingSparseMoE._route = _route
    module.LanguageModel.make_cache = _make_cache


def arrays(module: ModuleType) -> None:
    """Renames and splits arrays that transformers writes; keeps convolutions in float32."""
    converted(_of_transformers)(module)
    module.Model.cast_predicate = property(lambda self: lambda name: _CONVOLUTION not in name)


def _make_cache(self: Any) -> list[Any]:
    windows = [layer.self_attn.sliding for layer in self.model.layers]
    return [
        CacheList(MaskedWindowCache(window) if window else KVCache(), ArraysCache(_CONVOLUTIONS))
        for window in windows
    ]


def _attend(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, cache: Any = None, conv_mask: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], AttendingCache):
            return dense(self, x, cache, conv_mask)
        of_attention, of_convolutions = cache
        sizes = self.qkvr_dims
        ends = [sum(sizes[:count]) for count in range(1, len(sizes))]
        queries, keys, values, relative = mx.split(self.qkvr_proj(x), ends, axis=-1)
        if isinstance(of_convolutions, ConvolvingCache):
            both = (self.k_sconv, self.v_sconv)
            keys, values = _convolved(both, (keys, values), of_convolutions)
        else:
            keys = self.k_sconv(keys, cache=of_convolutions)
            values = self.v_sconv(values, cache=of_convolutions)
        # All tokens in one axis, as texts of one token: [T, heads, 1, size].
        count = x.shape[0] * x.shape[1]
        heads = (count, -1, 1, self.head_dim)
        queries, keys = self.q_norm(queries.reshape(heads)), self.k_norm(keys.reshape(heads))
        bias = relative.reshape(count, self.n_heads, -1) @ self.rel_proj.astype(x.dtype)
        if self.log_floor is not None:
            factors = log_factors(of_attention.offset, self.log_floor, self.log_alpha)
            queries = (queries * factors[:, None]).astype(x.dtype)
            bias = (bias * factors).astype(x.dtype)
        keys, values = of_attention.update_and_fetch(keys, values.reshape(heads))
        mixed = of_attention.attend(queries, keys, values, Scoring(self.scale, bias=bias))
        projected: mx.array = self.o_proj(mixed.reshape(*x.shape[:2], -1))
        return projected

    return attention


def log_factors(positions: mx.array, floor: int, alpha: float) -> mx.array:
    """Returns [T, 1, 1] float32, the factors of scores by position (transformers' `tau`)."""
    counts = (positions + 1).astype(mx.float32)
    return (1.0 + alpha * mx.log(mx.maximum(counts / floor, 1.0)))[:, None, None]


def _convolve(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def call(
        self: Any, x: mx.array, cache: Any = None, mask: Any = None, residual: Any = None
    ) -> mx.array:
        if isinstance(cache, ConvolvingCache):
            (out,) = _convolved((self,), (x,), cache)
            return out if residual is None else residual + out
        if not isinstance(cache, SequenceCall):
            return before(self, x, cache, mask, residual)
        # The module's kernel for few tokens reads the cache by itself, so it is left out.
        inputs = x.astype(mx.float32)
        weighted = self.conv(inputs.astype(self.conv.weight.dtype)).astype(mx.float32)
        out = (weighted + inputs).astype(x.dtype)
        return out if residual is None else residual + out

    return call


def _convolved(
    modules: Sequence[Any], inputs: Sequence[mx.array], cache: ConvolvingCache
) -> list[mx.array]:
    """Returns [..., C] outputs of convolutions whose [..., C] inputs are stored together."""
    sizes = [each.shape[-1] for each in inputs]
    ends = [sum(sizes[:count]) for count in range(1, len(sizes))]
    joined = mx.concatenate([*inputs], axis=-1) if ends else inputs[0]

    def apply(rows: mx.array) -> mx.array:
        parts = zip(modules, mx.split(rows, ends, axis=-1), strict=True)
        weighted = [each.conv(part.astype(each.conv.weight.dtype)) for each, part in parts]
        return mx.concatenate(weighted, axis=-1).astype(mx.float32)

    weighted = cache.convolve(joined.reshape(-1, joined.shape[-1]), apply).reshape(joined.shape)
    out = (weighted + joined.astype(mx.float32)).astype(joined.dtype)
    return list(mx.split(out, ends, axis=-1))


def _route(self: Any, logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Chooses experts in MLX's operations; the module's kernel is compiled for each number of rows.

    logits: [N, routed + shared]. Returns [N, K] experts, [N, K] weights, and the shared experts'
    weights once for each of their hidden elements. Formula: transformers' `InklingTopkRouter`.
    """
    routed, shared = mx.split(logits.astype(mx.float32), [self.n_routed], axis=-1)
    ranked = -(mx.sigmoid(routed) + self.e_score_correction_bias)
    experts = mx.argpartition(ranked, self.top_k - 1, axis=-1)[:, : self.top_k]
    chosen = mx.concatenate([mx.take_along_axis(routed, experts, axis=-1), shared], axis=-1)
    shares = mx.softmax(nn.log_sigmoid(chosen), axis=-1)
    weights = (shares * (self.route_scale * self.global_scale)).astype(logits.dtype)
    of_shared = mx.repeat(weights[:, self.top_k :], self.intermediate_size, axis=-1)
    return experts.astype(mx.uint32), weights[:, : self.top_k], of_shared


def _in_its_dtype(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    # Its scale may be float32.
    return lambda self, x: before(self, x).astype(x.dtype)


def _of_transformers(model: nn.Module, weights: Arrays) -> Arrays:
    """Maps transformers' names to the module's, and their arrays to its layout."""
    found: Arrays = {}
    for name, array in weights.items():
        if _CONVOLUTION in name:
            array = array.astype(mx.float32)
        if name.startswith(_PUBLISHED):
            found[name] = array
            continue
        for pattern, replacement in _NAMES:
            name = pattern.sub(replacement, name)
        if name.endswith("_sconv.conv.weight") and array.shape[-1] != 1:
            array = array.swapaxes(1, 2)  # [channels, 1, taps] of torch
        if name.endswith(_GATE_UP):
            prefix = name.removesuffix(_GATE_UP) + ".mlp.switch_mlp."
            for part, half in zip(("gate", "up"), mx.split(array, 2, axis=1), strict=True):
                found[f"{prefix}{part}_proj.weight"] = mx.contiguous(half)
            continue
        found[name] = array
    return found
