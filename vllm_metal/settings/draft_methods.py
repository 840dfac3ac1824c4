# SPDX-License-Identifier: Apache-2.0
"""Lists the methods of --speculative-config that write K/V into the blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Methods whose network keeps its own K/V, in the same blocks as the target's.
KEEPING_KV = frozenset(("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"))


def keeps_kv(config: VllmConfig) -> bool:
    """Whether the configured method, if any, keeps its own K/V."""
    speculation = config.speculative_config
    return speculation is not None and speculation.method in KEEPING_KV
