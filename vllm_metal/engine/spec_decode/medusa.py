# SPDX-License-Identifier: Apache-2.0
"""Medusa heads: each predicts, from one hidden state, one token further than the head before it.

Cai et al. 2024, arXiv:2401.10774; takes each head's likeliest token instead of their tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.spec_decode.newest_state import StateHeads, StateNetwork

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.models.parts import ModelParts


class MedusaHeads(StateHeads):
    """Head k predicts token i + k + 2 from the hidden state at i; the model itself predicts i + 1.

    A head is a stack of residual blocks, x + silu(linear(x)), and a projection to the vocabulary.
    """

    def __init__(self, weights: Mapping[str, mx.array]) -> None:
        """
        Args:
            weights: the checkpoint's arrays, named `blocks.HEAD.layers.LAYER`, `lm_heads.HEAD` (or
                `lm_head`, shared by all heads), and optionally `token_map`.

        Raises:
            KeyError, ValueError: the arrays are not those of Medusa heads.
        """
        super().__init__()
        self.num_heads = sum(f"blocks.{head}.layers.0.weight" in weights for head in range(100))
        self.hidden_size = weights["blocks.0.layers.0.weight"].shape[0]
        self.blocks = [_ResidualBlock(weights, f"blocks.{head}") for head in range(self.num_heads)]
        self._shared = "lm_head.weight" in weights
        num_tokens = weights["lm_head.weight" if self._shared else "lm_heads.0.weight"].shape[0]
        if "token_map" in weights:
            self.token_map = mx.zeros_like(weights["token_map"])
        if self._shared:
            self.lm_head = nn.Linear(self.hidden_size, num_tokens, bias=False)
        else:
            self.lm_heads = [
                nn.Linear(self.hidden_size, num_tokens, bias=False) for _ in range(self.num_heads)
            ]
        self.load_weights(list(weights.items()))

    def __call__(self, hidden: mx.array, newest: mx.array, num_heads: int) -> mx.array:
        """Drafts from the hidden states; ignores the newest tokens. See StateHeads."""
        columns = []
        for index, block in enumerate(self.blocks[:num_heads]):
            project = self.lm_head if self._shared else self.lm_heads[index]
            columns.append(mx.argmax(project(block(hidden)), axis=-1))
        found = mx.stack(columns, axis=1)
        if "token_map" in self:  # the heads know the most frequent tokens only
            found = self.token_map[found]
        return found.astype(mx.int32)

    def drafted_tokens(self) -> mx.array:
        if "token_map" in self:
            return self.token_map
        return mx.arange(len((self.lm_head if self._shared else self.lm_heads[0]).weight))


class _ResidualBlock(nn.Module):
    def __init__(self, weights: Mapping[str, mx.array], name: str) -> None:
        super().__init__()
        self.layers: list[nn.Linear] = []
        while (weight := weights.get(f"{name}.layers.{len(self.layers)}.weight")) is not None:
            bias = f"{name}.layers.{len(self.layers)}.bias" in weights
            self.layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=bias))

    def __call__(self, hidden: mx.array) -> mx.array:
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        return hidden


class Medusa(StateNetwork):
    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        super().__init__(
            config, target, lambda arrays: MedusaHeads(_renamed(arrays)), "Medusa heads"
        )


def _renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Renames the checkpoint's arrays as MedusaHeads expects.

    Medusa's authors use `HEAD.LAYER.linear.weight`, and `HEAD.NUM_LAYERS.weight` for a projection.
    """
    found = {}
    for name, array in weights.items():
        name = name.removeprefix("medusa_heads.")
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        name = re.sub(r"^(\d+)\.\d+\.(weight|bias)$", r"lm_heads.\1.\2", name)
        found[name] = array
    if "blocks.1.layers.0.weight" in found and "lm_heads.1.weight" not in found:
        for name in found.keys() & {"lm_heads.0.weight"}:  # one for all heads
            found["lm_head.weight"] = found.pop(name)
    frequent = found.get("token_map")
    for name, array in found.items():
        if frequent is not None and "lm_head" in name and len(array) > len(frequent):
            found[name] = array[frequent]
    return found
