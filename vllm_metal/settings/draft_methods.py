# SPDX-License-Identifier: Apache-2.0
"""Methods of --speculative-config that write K/V, and drafts that are on by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

#: Methods whose network keeps its own K/V, in the same blocks as the target's.
KEEPING_KV = frozenset(("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark"))
#: Architectures, as vLLM names them, whose network reads the target's K/V instead.
READING_KV = frozenset(("Gemma4MTPModel",))

#: Setting that turns off default drafts, for messages.
OFF_SWITCH = """--additional-config '{"drafts": "off"}'"""
#: Attribute that marks a SpeculativeConfig as the default.
_BY_DEFAULT = "vllm_metal_by_default"


def mark_default(speculation: SpeculativeConfig) -> None:
    """Marks drafts as a default that the user did not ask for, to drop if they do not fit."""
    setattr(speculation, _BY_DEFAULT, True)


def drop_default(config: VllmConfig) -> bool:
    """Removes default drafts from an engine's configuration; returns whether there were any.

    Drafts that the user asked for stay. Call it before the scheduler is made.
    """
    is_default = getattr(config.speculative_config, _BY_DEFAULT, False)
    if is_default:
        config.speculative_config = None
    return is_default


def are_default(config: VllmConfig) -> bool:
    """Whether an engine drafts by default, without the user's asking."""
    return getattr(config.speculative_config, _BY_DEFAULT, False)


def keeps_kv(config: VllmConfig) -> bool:
    """Whether the configured draft network, if any, keeps K/V of its own."""
    speculation = config.speculative_config
    if speculation is None or speculation.method not in KEEPING_KV:
        return False
    draft = getattr(speculation, "draft_model_config", None)
    return READING_KV.isdisjoint(getattr(draft, "architectures", None) or ())
