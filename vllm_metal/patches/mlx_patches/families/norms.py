# SPDX-License-Identifier: Apache-2.0
"""The epsilon of norms that mlx-lm's modules make with a default of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal.patches.mlx_patches.replacing import after_init


def epsilon(key: str) -> Callable[[ModuleType], None]:
    """Patches a module whose norms all have one epsilon in transformers' class.

    Args:
        key: of config.json, which has it.
    """

    def apply(module: ModuleType) -> None:
        kinds = (nn.RMSNorm, getattr(module, "RMSNorm", nn.RMSNorm))

        def set_epsilon(model: nn.Module, args: Any) -> None:
            for _, layer in model.named_modules():
                if isinstance(layer, kinds):
                    layer.eps = getattr(args, key)

        after_init(module.Model, set_epsilon)

    return apply


def of_latents(attention: str) -> Callable[[ModuleType], None]:
    """Patches a module whose norms of MLA's latents have 1e-6 in transformers' class.

    Args:
        attention: name of the module's class that has them.
    """

    def set_epsilon(layer: nn.Module, *args: Any, **options: Any) -> None:
        for name, norm in layer.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                norm.eps = 1e-6

    return lambda module: after_init(getattr(module, attention), set_epsilon)
