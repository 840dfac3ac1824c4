# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that images take: cached outputs and the tower's peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from vllm_metal.engine.memory.planner import peak_of
from vllm_metal.engine.vision.encoder import Encoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Largest image that is measured, in rows. A model's largest would delay the start by a minute;
#: towers use fused attention, so memory grows linearly with rows.
SAMPLED_ROWS = 256


def image_bytes(encoder: Encoder, config: VllmConfig) -> int:
    """Bytes of vLLM's full encoder cache plus the tower's peak for the largest image."""
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
