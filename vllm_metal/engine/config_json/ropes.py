# SPDX-License-Identifier: Apache-2.0
"""Positions of one loaded model: its ropes, and the longest text that they serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils  # whose function is patched, see mlx_patches

from vllm_metal.engine.config_json.config_refusals import PARTIAL, UNSCALED
from vllm_metal.engine.config_json.rope_parameters import rotated_share, scaling
from vllm_metal.identity.model_files import ModelLoadError


def fix_ropes(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replaces plain ropes where the config asks for others: scaled, or of a share of each head.

    The new ones are those that mlx-lm's other modules have for such a configuration.

    Args:
        model: as mlx-lm makes it.
        config: of config.json.

    Raises:
        ModelLoadError: mlx-lm knows no such scaling, or a rope has an odd width.
    """
    words = config.get("text_config") or config
    scaled, share = scaling(words), rotated_share(words)
    for _, layer in model.named_modules():
        module = type(layer).__module__.rpartition(".")[2]
        rope = layer.get("rope")
        if type(rope) is not nn.RoPE:
            continue
        if rope.dims % 2:
            raise ModelLoadError(
                f"RoPE rotates {rope.dims} elements of each head, which must be an even "
                "number: check num_attention_heads, head_dim and partial_rotary_factor (or "
                "rope_parameters) in config.json"
            )
        scales = scaled if module in UNSCALED else None
        turns = share if module in PARTIAL else 1.0
        if scales is None and turns == 1.0:
            continue
        try:
            layer.rope = rope_utils.initialize_rope(
                int(rope.dims * turns),
                rope.base,
                rope.traditional,
                scales,
                words.get("max_position_embeddings"),
            )
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"the RoPE settings of config.json: {error}") from error


def fit_context(model: nn.Module, max_model_len: int) -> None:
    """Has LongRoPE rotate by its factors for short contexts, where none longer will come.

    transformers chooses by each text's length; K in a cache cannot change, so vLLM chooses by the
    longest that is allowed, as this does (Ding et al. 2024, arXiv:2402.13753).

    A rope of type "dynamic" has a base for each text's length behind the trained one, of the keys
    that were computed before as well: those in a cache cannot change. Most layers of Llama 4 see
    the chunk of `attention_chunk_size` positions that a token is in, and no other: the pool has no
    blocks of that kind.

    Args:
        model: as mlx-lm makes it, with factors for long contexts.
        max_model_len: tokens of the longest text.

    Raises:
        ModelLoadError: a text may be longer than those that a dynamic rope was trained with, or
            than a chunk of attention.
    """
    text: Any = getattr(getattr(model, "args", None), "text_config", None)
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and max_model_len > chunk:
        raise ModelLoadError(
            f"attention_chunk_size={chunk} of config.json is supported only for texts of "
            f"one chunk: set --max-model-len to {chunk} or less"
        )
    for _, rope in model.named_modules():
        if isinstance(rope, rope_utils.DynamicNTKScalingRoPE):
            trained = rope.max_position_embeddings
            if max_model_len > trained:
                raise ModelLoadError(
                    f"rope_type='dynamic' is supported only up to {trained} tokens "
                    "(max_position_embeddings), as longer texts change the rotation of earlier "
                    f"keys: set --max-model-len to {trained} or less"
                )
        if not isinstance(rope, rope_utils.SuScaledRoPE):
            continue
        given: Any = rope.given
        if max_model_len <= given.original_max_position_embeddings:
            exponents = mx.arange(0, given.dims, 2, dtype=mx.float32) / given.dims
            short = mx.array(given.short_factor, dtype=mx.float32)
            rope._freqs = short * given.base**exponents
            rope._scale = given.short_mscale or rope._scale
