# SPDX-License-Identifier: Apache-2.0
"""Arrays under names that a family's files have, and mlx-lm's module does not know."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.mlx_patches.patch import replace_method

_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.")


def renamed(rename: Callable[[str], str]) -> Callable[[ModuleType], None]:
    """What patches a module.

    Args:
        rename: gives the name that the module knows, of one in files.
    """

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known: dict[str, mx.array] = before(
                self, {rename(name): array for name, array in weights.items()}
            )
            return known

        return sanitize

    def apply(module: ModuleType) -> None:
        replace_method(module.Model, "sanitize", sanitized)

    return apply


def without_transformer(name: str) -> str:
    """Of GPT-2, whose arrays transformers 5 writes as parts of a `transformer`."""
    return name.removeprefix("transformer.")


def dense_of_kimi(name: str) -> str:
    """Layers without experts, which transformers writes under the name of those with experts."""
    return _DENSE.sub(r".mlp.\1.", name)


def norms_of_olmo(name: str) -> str:
    """Norms of OLMo hybrid; transformers' conversion_mapping.py has the same two."""
    return ".".join(_NORMS.get(part, part) for part in name.split("."))
