# SPDX-License-Identifier: Apache-2.0
"""Checks that a draft network and its target agree on token ids; MLX does not check bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.models.loader import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BoundedEmbedding(nn.Module):
    """An embedding that reads its last row for ids beyond it.

    A draft network may have fewer rows than its target. What it drafts for such tokens is checked
    by the target as all drafts are.
    """

    def __init__(self, embedding: nn.Module) -> None:
        """
        Args:
            embedding: with one row for each token.
        """
        super().__init__()
        self.embedding = embedding

    def __call__(self, token_ids: mx.array) -> mx.array:
        """[..., H] of [...] int32."""
        last = len(self.embedding.weight) - 1
        found: mx.array = self.embedding(mx.minimum(token_ids, last))
        return found


def bounded(embedding: nn.Module, config: VllmConfig) -> nn.Module:
    """The embedding, made safe for each token id of the target."""
    rows = len(embedding.weight)
    return (
        embedding if rows >= config.model_config.get_vocab_size() else BoundedEmbedding(embedding)
    )


def check_drafted(token_ids: mx.array, config: VllmConfig) -> None:
    """Checks that a network drafts tokens of the target alone.

    Args:
        token_ids: all that it can draft, as the target numbers them.
        config: vLLM's, whose speculative_config names the network.

    Raises:
        ModelLoadError: the target has no such token.
    """
    assert config.speculative_config is not None
    least, most = int(token_ids.min()), int(token_ids.max())
    size = config.model_config.get_vocab_size()
    if least < 0 or most >= size:
        raise ModelLoadError(
            f"{config.speculative_config.model} drafts token ids from {least} to {most}, but "
            f"{config.model_config.model} has {size} tokens. Choose a network made for this model."
        )
