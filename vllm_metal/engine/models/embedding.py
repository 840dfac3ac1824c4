# SPDX-License-Identifier: Apache-2.0
"""Where mlx-lm's families keep the module that holds their layers, and the embedding of tokens."""

from __future__ import annotations

import mlx.nn as nn


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The module that holds the layers and returns hidden states; None where that is the model."""
    layers = [id(layer) for layer in model.layers]  # some families give a copy of the list
    for _, module in model.named_modules():
        found = module.get("layers")
        if isinstance(found, nn.Module) and not callable(found):
            found = found.get("layers")  # of a mere container
        if module is model or not callable(module) or not isinstance(found, list):
            continue
        if [id(layer) for layer in found] == layers:
            return module
    return None


def embedding_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that has the embedding, and its name there; None: under none of the usual ones."""
    decoder = decoder_of(model) or model
    for name in ("embed_tokens", "wte", "embedding"):
        if isinstance(decoder.get(name), nn.Module):
            return decoder, name
    return None
