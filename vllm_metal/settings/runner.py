# SPDX-License-Identifier: Apache-2.0
"""Tells whether --runner selects an engine that generates text or one that pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pools(config: VllmConfig) -> bool:
    """Whether an engine embeds, scores or classifies instead of generating tokens."""
    model = config.model_config
    return model is not None and model.runner_type == "pooling"
