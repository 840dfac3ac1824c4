# SPDX-License-Identifier: Apache-2.0
"""Creates frozen float32 torch layers from MLX weights, for vLLM's poolers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import torch


def linear(weight: mx.array, bias: mx.array | None = None) -> torch.nn.Linear:
    """Returns a layer from weights [out, in] and an optional bias [out]."""
    size_out, size_in = weight.shape
    return _filled(torch.nn.Linear(size_in, size_out, bias=bias is not None), weight, bias)


def layer_norm(weight: mx.array, bias: mx.array | None, eps: float) -> torch.nn.LayerNorm:
    """Returns a norm over the last axis from weights [H] and an optional bias [H]."""
    return _filled(torch.nn.LayerNorm(weight.size, eps=eps, bias=bias is not None), weight, bias)


def _filled(made: Any, weight: mx.array, bias: mx.array | None) -> Any:
    with torch.no_grad():
        for parameter, array in ((made.weight, weight), (made.bias, bias)):
            if array is not None:
                parameter.copy_(torch.from_numpy(np.array(array.astype(mx.float32))))
    return made.requires_grad_(False)
