# SPDX-License-Identifier: Apache-2.0
"""Corrects the choice, weights and files of experts where mlx-lm differs from transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from vllm.logger import init_logger

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap

logger = init_logger(__name__)

_BIAS = "e_score_correction_bias"
_LACKS = (
    f"The folder lacks {_BIAS}, which mlx-lm's conversion omits. Without it, the model chooses "
    "other experts and answers differently. Serve the published checkpoint instead"
)
_EXPERT = re.compile(r".*\.mlp\.experts\.(\d+)\..*")


def grouped(name: str = "group_expert_select") -> Callable[[ModuleType], None]:
    """Returns a patch of function `name`: it never chooses experts outside the best groups."""

    def choosing(before: Callable[..., Any]) -> Callable[..., Any]:
        def select(gates: mx.array, bias: mx.array, top_k: int, n_group: int, *others: Any) -> Any:
            # A router adds a bias to its scores, and chooses among the experts of the best groups.
            # mlx-lm gives the others a score of 0, which exceeds that of an expert whose bias is
            # below minus its score; transformers gives them minus infinity
            # (`route_tokens_to_experts`). Scores are positive, and a constant added to all changes
            # no choice: with biases of at least 0, a score of 0 is the minimum. Weights use scores
            # without biases.
            chosen_by = bias - bias.min() if n_group > 1 else bias
            return before(gates, chosen_by, top_k, n_group, *others)

        return select

    return lambda module: wrap(module, name, choosing)


def jamba(module: ModuleType) -> None:
    """Corrects how Jamba weights experts, and which layers have experts."""

    def routed(self: Any, x: mx.array) -> mx.array:
        # mlx-lm normalizes the weights of the chosen experts; the model was trained with their
        # share of all (`JambaSparseMoeBlock.route_tokens_to_experts`).
        shares = mx.softmax(self.router(x), axis=-1, precise=True)
        count = self.num_experts_per_tok
        chosen = mx.stop_gradient(mx.argpartition(-shares, kth=count - 1, axis=-1)[..., :count])
        weights = mx.take_along_axis(shares, chosen, axis=-1)[..., None]
        mixed: mx.array = (self.switch_mlp(x, chosen) * weights).sum(axis=-2)
        return mixed

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any, layer_type: str, layer_idx: int) -> None:
            # mlx-lm counts `expert_layer_offset` from the other end of a period
            # (`JambaConfig.layers_num_experts`), which is the same for a period of two. It only
            # tests whether index + offset is a multiple of the period.
            before(self, args, layer_type, -layer_idx)

        return init

    module.JambaSparseMoeBlock.__call__ = routed
    wrap(module.JambaDecoderLayer, "__init__", built)


def ernie4_5_moe(module: ModuleType) -> None:
    """Adds the router's bias to the scores, which mlx-lm drops (`Ernie4_5_MoeTopKRouter`)."""

    def add_bias(layer: Any, args: Any) -> None:
        layer[_BIAS] = mx.zeros(args.moe_num_experts)

    def routed(self: Any, x: mx.array) -> mx.array:
        scores = self.gate_act(self.gate(x).astype(mx.float32))
        chosen = mx.argpartition(-(scores + self[_BIAS]), kth=self.k - 1, axis=-1)[..., : self.k]
        chosen = mx.stop_gradient(chosen)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-12)
        mixed = self.switch_mlp(x, chosen)
        out: mx.array = (mixed * weights[..., None]).sum(axis=-2).astype(mixed.dtype)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def sanitized(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
        def sanitize(self: Any, weights: Arrays) -> Arrays:
            given = {
                f"{name.partition('.mlp.')[0]}.mlp.{_BIAS}": bias.reshape(-1)
                for name, bias in weights.items()
                if name.endswith(_BIAS) and ".mlp." in name
            }
            found = before(self, weights)
            for index, layer in enumerate(self.layers):
                if isinstance(layer.mlp, module.Ernie4_5_MoeMLP):
                    if not given:  # converted by mlx-lm: served without the bias
                        logger.warning_once(_LACKS)
                    name = f"model.layers.{index}.mlp.{_BIAS}"
                    found[name] = given.get(name, layer.mlp[_BIAS])
            return found

        return sanitize

    after_init(module.Ernie4_5_MoeMLP, add_bias)
    wrap(module.Model, "sanitize", sanitized)
    module.Ernie4_5_MoeMLP.__call__ = routed


def with_weights(model: Any, weights: Arrays) -> Arrays:
    """Drops arrays of LongCat-Flash's identity experts."""
    # transformers also reserves and writes rows for them (`LongcatFlashExperts`); mlx-lm's module
    # has no place for them.
    return _first(weights, model.args.n_routed_experts)


def of_text(model: Any, weights: Arrays) -> Arrays:
    """Drops Ernie 4.5 VL's experts of images, which follow those of text."""
    return _first(weights, model.args.moe_num_experts)


def _first(weights: Arrays, count: int) -> Arrays:
    return {
        name: array
        for name, array in weights.items()
        if (found := _EXPERT.fullmatch(name)) is None or int(found[1]) < count
    }


def in_full_precision(model: Any, weights: Arrays) -> Arrays:
    """Converts the experts of gpt-oss files with unquantized weights."""
    # mlx-lm's module only knows the names and the layout of MXFP4 files, where rows are outputs. In
    # full precision rows are inputs, and gate and value outputs alternate (transformers'
    # `GptOssExperts`).
    if not any(name.endswith("experts.gate_up_proj") for name in weights):
        return weights
    return dict(pair for name, array in weights.items() for pair in _split(name, array))


def _split(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
    """Splits an array of gpt-oss's experts into those of mlx-lm's module; keeps other arrays."""
    head, _, last = name.rpartition(".")
    if not head.endswith(".experts"):
        return [(name, array)]
    of_biases = last.endswith("_bias")
    kind = "bias" if of_biases else "weight"
    if last.startswith("gate_up_proj"):
        halves = {"gate_proj": array[..., ::2], "up_proj": array[..., 1::2]}
    else:
        halves = {"down_proj": array}
    return [
        (f"{head}.{part}.{kind}", mx.contiguous(half if of_biases else half.swapaxes(-1, -2)))
        for part, half in halves.items()
    ]
