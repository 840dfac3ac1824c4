# SPDX-License-Identifier: Apache-2.0
"""The epsilon of norms that mlx-lm's modules make with a default of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal.mlx_patches.patch import replace_method


def epsilon(key: str) -> Callable[[ModuleType], None]:
    """What patches a module whose norms all have one epsilon in transformers' class.

    Args:
        key: of config.json, which has it.
    """

    def apply(module: ModuleType) -> None:
        kinds = (nn.RMSNorm, getattr(module, "RMSNorm", nn.RMSNorm))

        def built(before: Callable[..., Any]) -> Callable[..., Any]:
            def init(self: Any, args: Any) -> None:
                before(self, args)
                for _, layer in self.named_modules():
                    if isinstance(layer, kinds):
                        layer.eps = getattr(args, key)

            return init

        replace_method(module.Model, "__init__", built)

    return apply


def of_latents(attention: str) -> Callable[[ModuleType], None]:
    """What patches a module whose norms of MLA's latents have 1e-6 in transformers' class.

    Args:
        attention: name of the module's class that has them.
    """

    def apply(module: ModuleType) -> None:
        def built(before: Callable[..., Any]) -> Callable[..., Any]:
            def init(self: Any, *args: Any, **options: Any) -> None:
                before(self, *args, **options)
                for name, layer in self.named_modules():
                    if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                        layer.eps = 1e-6

            return init

        replace_method(getattr(module, attention), "__init__", built)

    return apply
