# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of images: what is kept of them, and what a tower needs to compute one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from vllm_metal.engine.memory.planner import peak_of
from vllm_metal.engine.vision.encoder import Encoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Rows of the image that is measured, at most. The largest that a model takes would hold up a start
#: by a minute; attention in towers is fused, so that memory grows with the rows and no faster.
SAMPLED_ROWS = 256


def image_bytes(encoder: Encoder, config: VllmConfig) -> int:
    """Bytes of the outputs that vLLM's scheduler counts at once, and of the tower at work.

    Args:
        encoder: with a tower that has its weights.
        config: vLLM's, whose encoder cache bounds what is kept.
    """
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
    largest = max(budget.mm_max_toks_per_item.values(), default=0)
    kept = budget.encoder_cache_size
    budget.reset_cache()
    if not largest:
        return 0
    tower = encoder.tower
    sample = tower.sample(min(largest, SAMPLED_ROWS))
    rows = tower.encode("image", sample)
    peak = peak_of(lambda: mx.eval(tower.encode("image", sample)))
    times = -(-largest // len(rows))
    return kept * encoder.row_bytes(rows) + times * peak
