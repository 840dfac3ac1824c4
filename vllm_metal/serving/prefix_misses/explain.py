# SPDX-License-Identifier: Apache-2.0
"""Explains how many cached tokens of an earlier prompt were missed, where, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_metal.serving.prefix_misses import changes
from vllm_metal.serving.prefix_misses.prompt import Prompt
from vllm_metal.serving.prefix_misses.recent import Closest, EarlierPrompt

Cause = Literal[
    "first_seen",  # no remembered prompt is similar
    "other_salt",  # only one of another owner is; never reported to clients
    "date",
    "identifier",
    "counter",
    "edit",  # any other change of a message
    "message_inserted",
    "message_removed",
    "tools_reordered",
    "tools_changed",
    "template",  # the template rendered the same messages differently
    "granularity",  # only whole blocks are cached, and a hybrid's are long
    "evicted",  # it was computed, but is no longer in the cache
    "in_flight",  # the earlier prompt is still being computed
]
#: Smallest miss in tokens that is reported. Every turn loses a few: the generation prompt after the
#: last message is not part of the next turn's prompt, and a partial block is not cached.
LEAST = 64
#: Tokens before and after a change that are decoded.
_BEFORE, _BEHIND = 24, 64


@dataclass(frozen=True)
class Miss:
    """Explanation of one prompt's miss."""

    cause: Cause
    cached: int  # tokens found in the cache
    lost: int  # additional tokens that would have been found otherwise
    token: int | None = None  # index of the first token that differs
    message: int | None = None  # index of the message with that token; None: none, or unknown
    role: str | None = None  # role of that message
    before: str = ""  # replaced text; for the prompt's owner only
    now: str = ""  # text in its place


def explain(
    prompt: Prompt,
    closest: Closest | None,
    cached: int,
    block_size: int,
    decode: Callable[[Sequence[int]], str],
) -> Miss | None:
    """Explains a prompt's miss; returns None if less than `LEAST` tokens were lost.

    Args:
        prompt: the new prompt.
        closest: the most similar earlier prompt, if any.
        cached: tokens found in the prefix cache.
        block_size: tokens per block.
        decode: detokenizes token ids.
    """
    findable = len(prompt.tokens) - 1  # the last token is always computed
    if closest is None:
        lost = findable - cached
        return Miss("first_seen", cached, lost) if lost >= LEAST else None
    before, common = closest.before, min(closest.common, findable)
    whole_blocks = common // block_size * block_size
    changed = min(before.num_tokens, findable) - common
    # Tokens lost to a change, to the block size, and to eviction.
    parts = changed, common - whole_blocks, whole_blocks - cached
    lost = sum(part for part in parts if part > 0)
    if lost < LEAST:
        return None
    # One missing block is no eviction: the block before the last may be dropped.
    if parts[2] == max(parts) and parts[2] > block_size:
        return Miss("evicted" if before.is_computed else "in_flight", cached, lost, cached)
    if changed < LEAST:
        return Miss("granularity", cached, lost, common)
    return _explain_change(prompt, before, common, cached, lost, decode)


def _explain_change(
    prompt: Prompt,
    before: EarlierPrompt,
    common: int,
    cached: int,
    lost: int,
    decode: Callable[[Sequence[int]], str],
) -> Miss:
    first, end = max(common - _BEFORE, 0), common + _BEHIND
    texts = decode(before.tokens(first, end)), decode(prompt.tokens[first:end].tolist())
    difference = changes.first(*texts)
    message, cause = _find_change(prompt, before.prompt)
    # Neither the text nor the messages match again after the change: it is another conversation.
    following = prompt.messages[(message or 0) + 1 :]
    if not difference.matches_after and not set(following).intersection(before.prompt.messages):
        return Miss("first_seen", cached, len(prompt.tokens) - 1 - cached, common)
    if cause is None or (cause == "edit" and difference.matches_after):
        cause = difference.kind
    role = None if message is None else prompt.messages[message].role
    found = difference.before, difference.now
    return Miss(cause, cached, lost, common, message, role, *found)


def _find_change(prompt: Prompt, before: Prompt) -> tuple[int | None, Cause | None]:
    """Returns the index of the first message that differs, and how it changed."""
    ours, theirs = prompt.messages, before.messages
    if not ours or not theirs:
        return None, None
    if prompt.tools != before.tools:
        same = sorted(prompt.tools) == sorted(before.tools)
        return None, "tools_reordered" if same else "tools_changed"
    shorter = min(len(ours), len(theirs))
    index = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if index == shorter:
        return None, "template" if len(ours) >= len(theirs) else "message_removed"
    if ours[index] in theirs[index + 1 :]:
        return index, "message_removed"
    if theirs[index] in ours[index + 1 :]:
        return index, "message_inserted"
    return index, "edit"
