# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 MoE: experts are chosen by scores with a bias, as transformers has it.

mlx-lm's module drops the bias (transformers' `Ernie4_5_MoeTopKRouter`). Folders that mlx-lm has
converted lack it, and are served as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from vllm.logger import init_logger

from vllm_metal.mlx_patches.patch import replace_method

logger = init_logger(__name__)

_NAME = "e_score_correction_bias"
_LACKS = (
    f"The folder has no {_NAME}: mlx-lm's conversion leaves it out. The published model chooses "
    "its experts by it, and answers otherwise: serve that folder instead"
)


def ernie4_5_moe(module: ModuleType) -> None:
    """The bias of the choice."""

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any) -> None:
            before(self, args)
            self[_NAME] = mx.zeros(args.moe_num_experts)

        return init

    def routed(self: Any, x: mx.array) -> mx.array:
        scores = self.gate_act(self.gate(x).astype(mx.float32))
        chosen = mx.argpartition(-(scores + self[_NAME]), kth=self.k - 1, axis=-1)[..., : self.k]
        chosen = mx.stop_gradient(chosen)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-12)
        mixed = self.switch_mlp(x, chosen)
        out: mx.array = (mixed * weights[..., None]).sum(axis=-2).astype(mixed.dtype)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            given = {
                f"{name.partition('.mlp.')[0]}.mlp.{_NAME}": bias.reshape(-1)
                for name, bias in weights.items()
                if name.endswith(_NAME) and ".mlp." in name
            }
            found: dict[str, mx.array] = before(self, weights)
            for index, layer in enumerate(self.layers):
                if isinstance(layer.mlp, module.Ernie4_5_MoeMLP):
                    if not given:
                        logger.warning_once(_LACKS)
                    name = f"model.layers.{index}.mlp.{_NAME}"
                    found[name] = given.get(name, layer.mlp[_NAME])
            return found

        return sanitize

    replace_method(module.Ernie4_5_MoeMLP, "__init__", built)
    replace_method(module.Model, "sanitize", sanitized)
    module.Ernie4_5_MoeMLP.__call__ = routed
