# SPDX-License-Identifier: Apache-2.0
"""Attention of ragged queries over paged K/V."""

from metal_kernels.paged_attention.op import AttentionPlan, plan, run

__all__ = ["AttentionPlan", "plan", "run"]
