# SPDX-License-Identifier: Apache-2.0
"""Enables explanations of prefix-cache misses, and normalization of prompts, in a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches import prompts
from vllm_metal.serving import metrics
from vllm_metal.serving.prefix_misses.header import MissHeader
from vllm_metal.serving.prefix_misses.normalize import normalizer
from vllm_metal.serving.prefix_misses.watch import Watch
from vllm_metal.settings.additional_config import AdditionalConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Wraps vLLM's application to explain prefix-cache misses, if its settings ask for it.

    No-op without an engine, as in a server that only renders prompts.
    """
    if (engine := state.engine_client) is None:
        return app
    config = engine.vllm_config
    settings = AdditionalConfig.of(config)
    if settings.normalize_prompts:
        prompts.rewrite(state.online_renderer, normalizer(settings.normalize_prompts))
    if not (settings.explain_prefix_misses and config.cache_config.enable_prefix_caching):
        return app
    tokenizer = engine.renderer.tokenizer

    def text(tokens: Sequence[int]) -> str:
        of_text = [token for token in tokens if token < prompts.IMAGES]
        if tokenizer is None:  # --skip-tokenizer-init
            return " ".join(map(str, of_text))
        return str(tokenizer.decode(of_text))

    block_size = None if config.model_config.is_hybrid else config.cache_config.block_size
    lost = metrics.of_process().lost_tokens
    prompts.watch(engine, Watch(text, lost, block_size))
    return MissHeader(app)
