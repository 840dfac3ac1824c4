# SPDX-License-Identifier: Apache-2.0
"""Tells which methods of --speculative-config leave K/V in the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Methods whose network keeps K/V of its own, in the same blocks as the target's.
KEEPING_KV = frozenset(("draft_model", "eagle", "eagle3", "mtp"))


def keeps_kv(config: VllmConfig) -> bool:
    """Whether the configured method, if any, keeps K/V of its own."""
    speculation = config.speculative_config
    return speculation is not None and speculation.method in KEEPING_KV
