# SPDX-License-Identifier: Apache-2.0
"""Checks that a draft network and its target agree on token ids; MLX does not check bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.models.loader import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.models.parts import ModelParts
    from vllm_metal.engine.spec_decode.block_drafter import BlockDrafter


class BoundedEmbedding(nn.Module):
    """An embedding that reads its last row for ids out of range.

    A draft network may have fewer rows than its target. Its drafts after such tokens are verified
    by the target like all others.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def __call__(self, token_ids: mx.array) -> mx.array:
        """Embeds [...] int32 token ids as [..., H]."""
        last = len(self.embedding.weight) - 1
        found: mx.array = self.embedding(mx.minimum(token_ids, last))
        return found


def bounded(embedding: nn.Module, config: VllmConfig) -> nn.Module:
    """Returns an embedding that accepts all token ids of the target, also those beyond its rows."""
    rows = len(embedding.weight)
    return (
        embedding if rows >= config.model_config.get_vocab_size() else BoundedEmbedding(embedding)
    )


def check_drafted(token_ids: mx.array, config: VllmConfig) -> None:
    """Checks that a network drafts only tokens that the target has.

    Args:
        token_ids: all ids that it can draft, as the target numbers them.
        config: vLLM's; its speculative_config names the network.

    Raises:
        ModelLoadError: the target lacks one of the tokens.
    """
    assert config.speculative_config is not None
    least, most = int(token_ids.min()), int(token_ids.max())
    size = config.model_config.get_vocab_size()
    if least < 0 or most >= size:
        raise ModelLoadError(
            f"{config.speculative_config.model} drafts token ids from {least} to {most}, but "
            f"{config.model_config.model} has {size} tokens. Choose a network made for this model."
        )


def check_block_drafter(drafter: BlockDrafter, config: VllmConfig, target: ModelParts) -> None:
    """Checks that a block drafter's sizes fit its target's.

    Args:
        drafter: loaded, before it shares the target's embedding and head.
        config: vLLM's; its speculative_config names the drafter.
        target: the model whose hidden states, embedding and head it uses.

    Raises:
        ModelLoadError: a size does not fit; the message names the key in the draft's config.json.
    """
    assert config.speculative_config is not None
    shape, size = drafter.config, config.model_config.get_vocab_size()
    model, hidden = config.speculative_config.model, config.model_config.get_hidden_size()
    shared = "lm_head" not in drafter or "embed_tokens" not in drafter
    own = "embed_tokens" in drafter
    mask_rows = len((drafter.embed_tokens if own else target.input_embedding).weight)
    wrong = {
        f"vocab_size={shape.vocab_size} (the target's is {size})": shape.vocab_size != size,
        f"draft_vocab_size={shape.draft_vocab_size} without an lm_head (the target's has {size} "
        "tokens)": "lm_head" not in drafter and shape.draft_vocab_size != size,
        f"draft_vocab_size={shape.draft_vocab_size} without d2t (the target has {size} tokens)": (
            drafter.d2t is None and shape.draft_vocab_size != size
        ),
        f"mask_token_id={shape.mask_token_id} (the embedding has {mask_rows} rows)": (
            drafter.mask_embedding is None and not 0 <= shape.mask_token_id < mask_rows
        ),
        f"target_hidden_size={shape.target_hidden_size} (the target's hidden states are of "
        f"{hidden})": shape.target_hidden_size != hidden,
        f"hidden_size={shape.hidden_size} without its own ends (the target's is {hidden})": (
            shared and shape.hidden_size != hidden
        ),
    }
    for what in (what for what, holds in wrong.items() if holds):
        raise ModelLoadError(
            f"config.json of {model}: {what}. Choose a drafter made for {config.model_config.model}"
        )
    check_drafted(drafter.drafted_tokens(), config)
