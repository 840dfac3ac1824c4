# SPDX-License-Identifier: Apache-2.0
"""Experts in groups: none is chosen of a group that was left out.

A router adds a bias to its scores, and chooses among the experts of the best groups. mlx-lm's
modules give the others a score of 0, which is more than that of an expert whose bias is below
minus its score; transformers' classes give them minus infinity (`route_tokens_to_experts`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx


def grouped(name: str = "group_expert_select") -> Callable[[ModuleType], None]:
    """What patches a module.

    Args:
        name: of its function that chooses.
    """

    def apply(module: ModuleType) -> None:
        before = getattr(module, name)

        @functools.wraps(before)
        def select(gates: mx.array, bias: mx.array, top_k: int, n_group: int, *others: Any) -> Any:
            # Scores are positive, and the same amount on all changes no choice: with biases from 0
            # on, a score of 0 is the least there can be. Weights are of scores without biases.
            chosen_by = bias - bias.min() if n_group > 1 else bias
            return before(gates, chosen_by, top_k, n_group, *others)

        setattr(module, name, select)

    return apply
