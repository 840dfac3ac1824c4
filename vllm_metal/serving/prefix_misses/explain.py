# SPDX-License-Identifier: Apache-2.0
"""Says what a prompt lost of an earlier one's K/V, where, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_metal.serving.prefix_misses import changes
from vllm_metal.serving.prefix_misses.prompt import Prompt
from vllm_metal.serving.prefix_misses.recent import Closest, Remembered

Cause = Literal[
    "first_seen",  # no prompt that is remembered goes on so
    "other_salt",  # one does, of another owner: never said to a client
    "date",
    "identifier",
    "counter",
    "edit",  # of a message, in any other way
    "message_inserted",
    "message_removed",
    "tools_reordered",
    "tools_changed",
    "template",  # the same messages, of which the template made something else
    "granularity",  # the cache has whole blocks, and a hybrid's are long
    "evicted",  # all of it was computed, and is there no more
    "in_flight",  # the earlier prompt is still being computed
]
#: Tokens that are worth a word. What a template puts behind a conversation's last message, so that
#: the model answers, is not there in the next turn; nor is a block that was not full.
LEAST = 64
#: Tokens before and behind a change that are made text of.
_BEFORE, _BEHIND = 24, 64


@dataclass(frozen=True)
class Miss:
    """Why a prompt was not found whole."""

    cause: Cause
    cached: int  # tokens that were found
    lost: int  # tokens more that would have been, without the cause
    token: int | None = None  # place of the first one that differs
    message: int | None = None  # index of the message that it is in; None: in none, or unknown
    role: str | None = None  # of that message
    before: str = ""  # what stood there; for the prompt's owner only
    now: str = ""


def explain(
    prompt: Prompt,
    closest: Closest | None,
    cached: int,
    block_size: int,
    decode: Callable[[Sequence[int]], str],
) -> Miss | None:
    """Compares a prompt with the one before it, and both with what the cache had.

    Args:
        prompt: that was asked.
        closest: of those before it; None: none is like it.
        cached: tokens of it that were found in the prefix cache.
        block_size: tokens that are found together.
        decode: makes text of tokens.

    Returns:
        None: what there was of it was found.
    """
    findable = len(prompt.tokens) - 1  # the last one is always computed
    if closest is None:
        lost = findable - cached
        return Miss("first_seen", cached, lost) if lost >= LEAST else None
    before, common = closest.before, min(closest.common, findable)
    whole_blocks = common // block_size * block_size
    changed = min(before.num_tokens, findable) - common
    parts = changed, common - whole_blocks, whole_blocks - cached
    lost = sum(part for part in parts if part > 0)
    if lost < LEAST:
        return None
    if parts[2] == max(parts) and parts[2] > block_size:  # the block before the last may be let go
        return Miss("evicted" if before.answered else "in_flight", cached, lost, cached)
    if changed < LEAST:
        return Miss("granularity", cached, lost, common)
    return _of_change(prompt, before, common, cached, lost, decode)


def _of_change(
    prompt: Prompt,
    before: Remembered,
    common: int,
    cached: int,
    lost: int,
    decode: Callable[[Sequence[int]], str],
) -> Miss:
    first, end = max(common - _BEFORE, 0), common + _BEHIND
    texts = decode(before.tokens(first, end)), decode(prompt.tokens[first:end].tolist())
    difference = changes.first(*texts)
    message, cause = _place(prompt, before.prompt)
    behind = prompt.messages[(message or 0) + 1 :]
    if not difference.goes_on and not set(behind).intersection(before.prompt.messages):
        return Miss("first_seen", cached, len(prompt.tokens) - 1 - cached, common)
    if cause is None or (cause == "edit" and difference.goes_on):
        cause = difference.kind
    role = None if message is None else prompt.messages[message].role
    found = difference.before, difference.now
    return Miss(cause, cached, lost, common, message, role, *found)


def _place(prompt: Prompt, before: Prompt) -> tuple[int | None, Cause | None]:
    """Index of the first message that is another one than before, and what became of it."""
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
