# SPDX-License-Identifier: Apache-2.0
"""Attention of ragged queries over paged K/V: by kernels (plan, run), or in MLX (reference)."""

from metal_kernels.paged_attention.op import run, unsupported
from metal_kernels.paged_attention.plan import AttentionPlan, AttentionShape, Tiles, plan, trials
from metal_kernels.paged_attention.splits import Splits

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
