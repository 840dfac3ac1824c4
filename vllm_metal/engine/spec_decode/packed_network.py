# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers of draft networks: packed by MLX's tools, or quantized when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.weights.placing import MODES

#: Columns per scale of a network that is quantized when loaded: mlx-lm's default.
GROUP_SIZE = 64


def packings(network: nn.Module, weights: Mapping[str, mx.array]) -> dict[str, dict[str, Any]]:
    """Maps each packed module to its bits, group size and mode, inferred from its arrays.

    config.json uses the checkpoint's names, and does not always list every module.

    Args:
        network: the network, not yet packed.
        weights: arrays by the network's names.
    """
    found = {}
    for path, module in network.named_modules():
        scales = weights.get(f"{path}.scales")
        if scales is not None and hasattr(module, "to_quantized"):
            size, packed = module["weight"].shape[-1], weights[f"{path}.weight"].shape[-1]
            bits, group_size = packed * 32 // size, size // scales.shape[-1]
            of_bytes = scales.dtype == mx.uint8
            mode = MODES.get((bits, group_size), "affine") if of_bytes else "affine"
            found[path] = {"group_size": group_size, "bits": bits, "mode": mode}
    return found


def pack(network: nn.Module, bits: int) -> None:
    """Quantizes the dense linear layers of a loaded network; leaves embeddings as they are."""

    def chosen(path: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and module.weight.shape[-1] % GROUP_SIZE == 0

    nn.quantize(network, GROUP_SIZE, bits, class_predicate=chosen)
