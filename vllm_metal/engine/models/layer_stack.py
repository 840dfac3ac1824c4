# SPDX-License-Identifier: Apache-2.0
"""Several layers of a Nemotron-H model, attention and MoE, that make up one MTP layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class LayerStack(nn.Module):
    """Runs mlx-lm's `NemotronHBlock`s one after the other; those that attend have caches."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = list(layers)

    def __call__(self, x: mx.array, mask: mx.array | None, *caches: Any) -> mx.array:
        """Returns [B, T, H] of [B, T, H] hidden states; `caches`: one per attention layer."""
        of_attention = iter(caches)
        for layer in self.layers:
            x = layer(x, mask, next(of_attention) if layer.block_type == "*" else None)
        return x
