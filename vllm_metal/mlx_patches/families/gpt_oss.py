# SPDX-License-Identifier: Apache-2.0
"""gpt-oss in full precision: experts as transformers writes them, in any floating-point dtype.

mlx-lm's module knows the names and the layout of MXFP4 files only, where rows are outputs. In full
precision rows are inputs, and outputs of the gate and of the values stand side by side by turns
(transformers' `GptOssExperts`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.mlx_patches.patch import replace_method

_JOINED = "experts.gate_up_proj"


def gpt_oss(module: ModuleType) -> None:
    """Reads them too."""

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if not any(name.endswith(_JOINED) for name in weights):
                found: dict[str, mx.array] = before(self, weights)
                return found
            return dict(pair for name, array in weights.items() for pair in _split(name, array))

        return sanitize

    replace_method(module.Model, "sanitize", sanitized)


def _split(name: str, array: mx.array) -> list[tuple[str, mx.array]]:
    """An array under mlx-lm's names."""
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
