# SPDX-License-Identifier: Apache-2.0
"""Finds out by rendering a chat template whether models think where a request does not say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_QUESTION = [{"role": "user", "content": "?"}]
#: Variables that transformers hands a template; what they hold does not matter here.
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Thinking:
    """What a template does for a request that says nothing of thinking."""

    opened: bool  # the prompt ends inside of <think>, so that the model begins with a thought
    by_default: bool  # the prompt is that of enable_thinking=True, and not that of False


NEVER = Thinking(opened=False, by_default=False)


def of_template(template: str) -> Thinking:
    """What a template does; `NEVER` where there is none, or it does not render so short a chat."""
    if "think" not in template:
        return NEVER
    try:
        plain = _prompt(template)
        on, off = (_prompt(template, enable_thinking=asked) for asked in (True, False))
    except Exception:  # a template may raise anything, and refuses chats in ways of its own
        return NEVER
    return Thinking(
        opened=plain.rfind("<think>") > plain.rfind("</think>"), by_default=plain == on != off
    )


def _prompt(template: str, **options: Any) -> str:
    # transformers compiles templates in jinja's sandbox, as it does for each request.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [_QUESTION], chat_template=template, add_generation_prompt=True, **options | _TOKENS
    )
    return str(rendered[0][0])
