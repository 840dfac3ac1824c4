# SPDX-License-Identifier: Apache-2.0
"""Uses the configured GELU: exact, or approximated by tanh.

mlx-lm's modules of some families always compute one of the two; these families' published models
configure the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.replacing import after_init

_GELUS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_new": nn.gelu_approx,
}


def gemma(module: ModuleType) -> None:
    """Patches Gemma's MLP to approximate the GELU of its gate by tanh."""

    # Published files say "gelu" but mean the approximation (transformers' `GemmaConfig`).
    def call(self: Any, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))
        return out

    module.MLP.__call__ = call


def gelu(key: str, default: str, first: str, second: str) -> Callable[[ModuleType], None]:
    """Returns a patch that makes a module's `MLP` use the configured kind of GELU.

    key: config.json's key of the activation. default: transformers' default for that key. first,
    second: projections of the `MLP`.
    """

    def apply(module: ModuleType) -> None:
        base: Any = module.ModelArgs
        changed = {
            "__annotations__": {"activation_name": str},
            "activation_name": field(default=default),
            "from_dict": classmethod(from_dict),
        }
        module.ModelArgs = dataclass(type("ModelArgs", (base,), changed))  # type: ignore[attr-defined]

        def set_activation(model: nn.Module, args: Any) -> None:
            for _, layer in model.named_modules():
                if isinstance(layer, module.MLP):
                    layer.activation = _GELUS[args.activation_name]

        def call(self: Any, x: mx.array) -> mx.array:
            out: mx.array = self[second](self.activation(self[first](x)))
            return out

        after_init(module.Model, set_activation)
        module.MLP.__call__ = call

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        name = params.get(key) or default
        if name not in _GELUS:
            raise ValueError(
                f"{key}={name!r} of config.json is not supported: the module computes "
                f"{' or '.join(_GELUS)}. Choose another checkpoint"
            )
        return super(cls, cls).from_dict(params | {"activation_name": name})

    return apply
