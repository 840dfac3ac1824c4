# SPDX-License-Identifier: Apache-2.0
"""Arrays under names that a family's files have, and mlx-lm's module does not know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.models.patches.patch import replace_method

_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.")


def renamed(names: Mapping[str, str]) -> Callable[[ModuleType], None]:
    """What patches a module.

    Args:
        names: parts of arrays' names in files, and in the module.
    """

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known: dict[str, mx.array] = before(
                self, {_replaced(name, names): array for name, array in weights.items()}
            )
            return known

        return sanitize

    def apply(module: ModuleType) -> None:
        replace_method(module.Model, "sanitize", sanitized)

    return apply


def gpt2(module: ModuleType) -> None:
    """All of them, which transformers 5 writes as parts of a `transformer`."""

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known: dict[str, mx.array] = before(
                self, {name.removeprefix("transformer."): a for name, a in weights.items()}
            )
            return known

        return sanitize

    replace_method(module.Model, "sanitize", sanitized)


def kimi_linear(module: ModuleType) -> None:
    """Layers without experts, which transformers writes under the name of those with experts."""

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known: dict[str, mx.array] = before(
                self, {_DENSE.sub(r".mlp.\1.", name): array for name, array in weights.items()}
            )
            return known

        return sanitize

    replace_method(module.Model, "sanitize", sanitized)


def _replaced(name: str, names: Mapping[str, str]) -> str:
    parts = name.split(".")
    return ".".join(names.get(part, part) for part in parts)
