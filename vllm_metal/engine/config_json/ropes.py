# SPDX-License-Identifier: Apache-2.0
"""Adjusts a loaded model's RoPE modules to config.json and the maximum length."""

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
    """Replaces plain RoPE modules if the config asks for scaled or partial RoPE.

    mlx-lm's `initialize_rope` makes the new ones.

    Raises ModelLoadError: mlx-lm does not know the scaling, or a rope has an odd width.
    """
    text_config = config.get("text_config") or config
    scaled, share = scaling(text_config), rotated_share(text_config)
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
        rotated = share if module in PARTIAL else 1.0
        if scales is None and rotated == 1.0:
            continue
        try:
            layer.rope = rope_utils.initialize_rope(
                int(rope.dims * rotated),
                rope.base,
                rope.traditional,
                scales,
                text_config.get("max_position_embeddings"),
            )
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"the RoPE settings of config.json: {error}") from error


def fit_context(model: nn.Module, max_model_len: int) -> None:
    """Selects LongRoPE's short-context factors if no longer context is allowed.

    transformers selects the factors by each text's length. Since cached K cannot change, vLLM
    selects by the maximum length, as this does (Ding et al. 2024, arXiv:2402.13753).

    Raises ModelLoadError: texts may exceed a dynamic rope's trained length or an attention chunk.
    """
    # With chunked attention, most layers of Llama 4 see only a token's own chunk of
    # `attention_chunk_size` positions; the pool has no blocks of that kind.
    text: Any = getattr(getattr(model, "args", None), "text_config", None)
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None and max_model_len > chunk:
        raise ModelLoadError(
            f"attention_chunk_size={chunk} of config.json is supported only for texts of "
            f"one chunk: set --max-model-len to {chunk} or less"
        )
    for _, rope in model.named_modules():
        # A "dynamic" rope's base depends on the text's length beyond the trained one, also for
        # earlier keys: those in a cache cannot change.
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
