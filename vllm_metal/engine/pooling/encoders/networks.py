# SPDX-License-Identifier: Apache-2.0
"""The forward of each family of encoders: token ids of many texts in, hidden states out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, of_rows
from vllm_metal.engine.pooling.encoders.attention import TextAttention

#: Which of a pair's texts a token is of, in `ForwardInputs.extras`: [T] int32.
TOKEN_TYPES = "token_types"
#: Where a token stands in its text, likewise.
_POSITIONS = "positions"

#: Attention of a step by a layer's window; None: without one.
Attention = Mapping[int | None, TextAttention]


class Encoder(Protocol):
    """An encoder whose weights are loaded."""

    model: nn.Module
    windows: tuple[int | None, ...]  # of its layers, each once

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        """[T, 1, H] hidden states of a step's rows, after the last norm; lazy."""
        ...


class Bert:
    """BERT, RoBERTa and XLM-R: learned positions, and norms behind the residuals."""

    windows: tuple[int | None, ...] = (None,)

    def __init__(self, model: nn.Module, first_position: int) -> None:
        """
        Args:
            model: mlx-vlm's.
            first_position: of a text, in the table of positions.
        """
        self.model: Any = model
        self._first_position = first_position

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        parts, ids = self.model.embeddings, inputs.input_ids[:, None]
        positions = inputs.positions[0][:, None] + self._first_position
        types = of_rows(TOKEN_TYPES, mx.zeros_like(ids))
        embedded = parts.word_embeddings(ids) + parts.token_type_embeddings(types)
        embedded = parts.LayerNorm(embedded + parts.position_embeddings(positions))
        return cast(mx.array, self.model.encoder(embedded, attention[None]))


class ModernBert:
    """ModernBERT: rotated queries and keys, and layers with and without a window."""

    def __init__(self, model: nn.Module, window: int) -> None:
        """
        Args:
            model: mlx-vlm's, with `PlacedRoPE` in its layers.
            window: of its local layers.
        """
        self.model: Any = model
        self._window = window
        kinds = [layer.attn.local for layer in self.model.layers]
        self.windows = tuple(dict.fromkeys(window if local else None for local in kinds))

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        whole, near = attention.get(None), attention.get(self._window)
        states = self.model.embeddings(inputs.input_ids[:, None])
        for layer in self.model.layers:
            states = layer(states, whole, near)
        return cast(mx.array, self.model.final_norm(states))


class PlacedRoPE(nn.Module):
    """Rotates each row by its place in its text, where mlx-vlm's modules count rows."""

    def __init__(self, dims: int, base: float) -> None:
        """
        Args:
            dims: of a head.
            base: of the angles.
        """
        super().__init__()
        self.dims, self.base = dims, base

    def __call__(self, x: mx.array) -> mx.array:
        """[T, H, 1, D] of the forward at hand."""
        at = of_rows(_POSITIONS)[:, 0]
        return mx.fast.rope(x, self.dims, traditional=False, base=self.base, scale=1.0, offset=at)


class EmbeddingGemma:
    """Gemma 3 whose tokens see those behind them, too."""

    def __init__(self, model: nn.Module, window: int) -> None:
        """
        Args:
            model: mlx-lm's, without a head.
            window: of its sliding layers.
        """
        self.model: Any = model
        kinds = [layer.self_attn.is_sliding for layer in self.model.layers]
        self._by_layer = [window if sliding else None for sliding in kinds]
        self.windows = tuple(dict.fromkeys(self._by_layer))

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        caches = [attention[window] for window in self._by_layer]
        return cast(mx.array, self.model.model(inputs.input_ids[:, None], cache=caches))


def with_positions(inputs: ForwardInputs) -> ForwardInputs:
    """The inputs of a forward, and what `PlacedRoPE` reads of them."""
    return inputs.with_extras({_POSITIONS: inputs.positions[0]})
