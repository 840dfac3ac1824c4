# SPDX-License-Identifier: Apache-2.0
"""Arrays under names that a family's files have, and mlx-lm's module does not know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.models.patches.patch import replace_method


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


def rewritten(pattern: str, replacement: str) -> Callable[[ModuleType], None]:
    """What patches a module.

    Args:
        pattern: a regular expression, of parts of arrays' names in files.
        replacement: of each, as in `re.sub`.
    """

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known: dict[str, mx.array] = before(
                self,
                {re.sub(pattern, replacement, name): array for name, array in weights.items()},
            )
            return known

        return sanitize

    def apply(module: ModuleType) -> None:
        replace_method(module.Model, "sanitize", sanitized)

    return apply


def _replaced(name: str, names: Mapping[str, str]) -> str:
    parts = name.split(".")
    return ".".join(names.get(part, part) for part in parts)
