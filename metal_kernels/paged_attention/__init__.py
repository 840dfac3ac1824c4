# SPDX-License-Identifier: Apache-2.0
"""Attention of ragged queries over paged K/V, by kernels (plan, run) or in MLX (reference)."""

from metal_kernels.paged_attention.op import run, unsupported
from metal_kernels.paged_attention.plan import AttentionPlan, plan
from metal_kernels.paged_attention.shape import AttentionShape
from metal_kernels.paged_attention.splits import Splits
from metal_kernels.paged_attention.tiles import Tiles
from metal_kernels.paged_attention.trials import trials

__all__ = [
    "AttentionPlan",
    "AttentionShape",
    "Splits",
    "Tiles",
    "plan",
    "run",
    "trials",
    "unsupported",
]
