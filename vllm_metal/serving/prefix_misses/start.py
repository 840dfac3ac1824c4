# SPDX-License-Identifier: Apache-2.0
"""Has a server say why prompts were not found in its prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_metal.serving import metrics
from vllm_metal.serving.prefix_misses.header import MissHeader
from vllm_metal.serving.prefix_misses.watch import Watch
from vllm_metal.settings.additional_config import AdditionalConfig
from vllm_metal.vllm_patches import prompts

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def around(app: ASGIApp, engine: Any) -> ASGIApp:
    """The application with the header on its answers, whose engine's prompts are watched.

    Args:
        app: vLLM's, with its middlewares.
        engine: that it asks; None: it has none.
    """
    config = None if engine is None else engine.vllm_config
    if config is None or not config.cache_config.enable_prefix_caching:
        return app
    if not AdditionalConfig.of(config).explain_prefix_misses:
        return app
    tokenizer = engine.renderer.get_tokenizer()
    block_size = None if config.model_config.is_hybrid else config.cache_config.block_size
    lost = metrics.of_process().lost_tokens
    prompts.watch(engine, Watch(tokenizer.decode, lost, block_size))
    return MissHeader(app)
