# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash: experts that give back what they get have no weights.

transformers makes room for them all the same in the array of gates and values
(`LongcatFlashExperts`), and writes it; mlx-lm's module has no place for it. The norms of latents
add 1e-6 to a mean there (`LongcatFlashRMSNorm`), 1e-5 here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.mlx_patches.families.norms import of_latents
from vllm_metal.mlx_patches.patch import replace_method

_EXPERT = re.compile(r".*\.mlp\.experts\.(\d+)\..*")


def longcat_flash(module: ModuleType) -> None:
    """Leaves such arrays out, and sets the norms."""

    def sanitized(before: Callable[..., Any]) -> Callable[..., Any]:
        def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            count = self.args.n_routed_experts
            used = {
                name: array
                for name, array in weights.items()
                if (found := _EXPERT.fullmatch(name)) is None or int(found[1]) < count
            }
            known: dict[str, mx.array] = before(self, used)
            return known

        return sanitize

    of_latents("LongcatFlashMLA")(module)
    replace_method(module.Model, "sanitize", sanitized)
