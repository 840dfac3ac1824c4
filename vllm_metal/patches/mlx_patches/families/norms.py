# SPDX-License-Identifier: Apache-2.0
"""Sets the epsilon of norms for which mlx-lm's modules use their own default."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal.patches.mlx_patches.replacing import after_init

#: Epsilon of float32: the default of torch's norms of any floating dtype below float64.
TORCH_EPSILON = 2.0**-23


def epsilon(key: str) -> Callable[[ModuleType], None]:
    """Returns a patch that sets all norms' epsilon to that in config.json's `key`."""

    def apply(module: ModuleType) -> None:
        kinds = (nn.RMSNorm, getattr(module, "RMSNorm", nn.RMSNorm))

        def set_epsilon(model: nn.Module, args: Any) -> None:
            for _, layer in model.named_modules():
                if isinstance(layer, kinds):
                    layer.eps = getattr(args, key)

        after_init(module.Model, set_epsilon)

    return apply


def of_latents(attention: str) -> Callable[[ModuleType], None]:
    """Returns a patch of MLA's norms in class `attention`: transformers always uses 1e-6 there."""

    def set_epsilon(layer: nn.Module, *args: Any, **options: Any) -> None:
        for name, norm in layer.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                norm.eps = 1e-6

    return lambda module: after_init(getattr(module, attention), set_epsilon)
