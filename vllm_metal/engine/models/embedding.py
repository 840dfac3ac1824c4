# SPDX-License-Identifier: Apache-2.0
"""Locates the module with the layers, and the token embedding, in mlx-lm's models."""

from __future__ import annotations

import mlx.nn as nn


def decoder_of(model: nn.Module) -> nn.Module | None:
    """Returns the submodule that maps tokens to hidden states; None: it is the model itself."""
    layers = [id(layer) for layer in model.layers]  # some families return a copy of the list
    for _, module in model.named_modules():
        found = module.get("layers")
        if isinstance(found, nn.Module) and not callable(found):
            found = found.get("layers")  # in a module that is only a container
        if module is model or not callable(module) or not isinstance(found, list):
            continue
        if [id(layer) for layer in found] == layers:
            return module
    return None


def embedding_of(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Returns the module with the embedding and the embedding's name, or None if not found."""
    decoder = decoder_of(model) or model
    for name in ("embed_tokens", "wte", "embedding", "embeddings"):
        if isinstance(decoder.get(name), nn.Module):
            return decoder, name
    return None


def embedding_norm_of(model: nn.Module) -> nn.Module | None:
    """Returns the norm that the model applies to token embeddings, not to images', if any."""
    norm = (decoder_of(model) or model).get("embed_norm")  # Inkling's
    return norm if isinstance(norm, nn.Module) else None
