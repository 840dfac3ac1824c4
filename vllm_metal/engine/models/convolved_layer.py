# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of Inkling in an MTP layer, which keeps the inputs of its convolutions."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.conv_input_layer import Convolutions


class ConvolvedLayer(nn.Module):
    """Runs mlx-vlm's decoder layer of Inkling over the pool."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        attention = layer.self_attn
        part = attention.n_kv * attention.head_dim
        hidden = layer.attn_sconv.conv.weight.shape[0]
        # Convolutions of K and V, of attention's output, and of the MLP's.
        self._counts = tuple(-(-width // (2 * part)) for width in (2 * part, hidden, hidden))

    @property
    def taps(self) -> int:
        """Kernel size of the convolutions."""
        taps: int = self.layer.attn_sconv.kernel_size
        return taps

    @property
    def num_input_layers(self) -> int:
        """Pool layers that hold the inputs; see conv_input_layer.py."""
        return sum(self._counts)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """Returns [T, 1, H] of [T, 1, H] hidden states.

        Args:
            cache: those of attention and of convolution inputs; attention's alone if the layer is
                traced for one token, which has no inputs before it.
        """
        attention, *inputs = cache if isinstance(cache, tuple) else (cache,)
        convolutions = None
        if inputs:
            ends = accumulate(self._counts, initial=0)
            convolutions = Convolutions([inputs[first:end] for first, end in pairwise(ends)])
        out: mx.array = self.layer(x, cache=(attention, convolutions))
        return out
