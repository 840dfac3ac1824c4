# SPDX-License-Identifier: Apache-2.0
"""Runs each family of encoders: token ids of many texts in, hidden states out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, of_rows
from vllm_metal.engine.pooling.encoders.attention import TextAttention

#: Key in `ForwardInputs.extras` of [T] int32: which text of a pair each token belongs to.
TOKEN_TYPES = "token_types"
#: Key of [T] int32: position of each token in its text.
_POSITIONS = "positions"

#: Attention of a step by layer window; None: unlimited.
Attention = Mapping[int | None, TextAttention]


class Encoder(Protocol):
    model: nn.Module
    windows: tuple[int | None, ...]  # distinct windows of the layers

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        """Returns lazy [T, 1, H] hidden states of a step's rows, after the last norm."""
        ...


class Bert:
    """BERT, RoBERTa and XLM-R: learned positions, and norms after the residuals."""

    windows: tuple[int | None, ...] = (None,)

    def __init__(self, model: nn.Module, first_position: int) -> None:
        """first_position: index of a text's first token in the position table."""
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
        """model: mlx-vlm's, with `PlacedRoPE` in its layers. window: length of local windows."""
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
    """Rotates each row by its position in its text; mlx-vlm's modules count rows instead."""

    def __init__(self, dims: int, base: float) -> None:
        super().__init__()
        self.dims, self.base = dims, base

    def __call__(self, x: mx.array) -> mx.array:
        """Rotates the rows of the current forward, [T, H, 1, D]."""
        at = of_rows(_POSITIONS)[:, 0]
        return mx.fast.rope(x, self.dims, traditional=False, base=self.base, scale=1.0, offset=at)


class EmbeddingGemma:
    """Gemma 3 with bidirectional attention."""

    def __init__(self, model: nn.Module, window: int) -> None:
        """model: mlx-lm's, without a head. window: window of sliding layers."""
        self.model: Any = model
        kinds = [layer.self_attn.is_sliding for layer in self.model.layers]
        self._by_layer = [window if sliding else None for sliding in kinds]
        self.windows = tuple(dict.fromkeys(self._by_layer))

    def hidden(self, inputs: ForwardInputs, attention: Attention) -> mx.array:
        caches = [attention[window] for window in self._by_layer]
        return cast(mx.array, self.model.model(inputs.input_ids[:, None], cache=caches))


def with_positions(inputs: ForwardInputs) -> ForwardInputs:
    """Adds positions to the inputs, for `PlacedRoPE`."""
    return inputs.with_extras({_POSITIONS: inputs.positions[0]})
