# SPDX-License-Identifier: Apache-2.0
"""Finds out by rendering a chat template whether models think where a request does not say so."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger(__name__)

_QUESTION = [{"role": "user", "content": "?"}]
#: That a template from a stranger may take to render so short a chat: loading transformers takes
#: one second of these.
SECONDS, MOST_BYTES = 20.0, 4 << 30
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


def of_unknown_template(template: str) -> Thinking:
    """As `of_template`, within bounds of time and memory: in a process of its own.

    A template is a program, which may have no end.
    """
    if "think" not in template:
        return NEVER
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=template,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
        )
        return Thinking(**json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError, TypeError):
        logger.warning(
            "The chat template does not render within %g s and %g GB, so it is not known whether "
            "the model thinks unasked: name --reasoning-parser if it does",
            SECONDS,
            MOST_BYTES / 1e9,
        )
        return NEVER


def _prompt(template: str, **options: Any) -> str:
    # transformers compiles templates in jinja's sandbox, as it does for each request.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [_QUESTION], chat_template=template, add_generation_prompt=True, **options | _TOKENS
    )
    return str(rendered[0][0])


if __name__ == "__main__":
    with suppress(ValueError, OSError):  # where a hard limit is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    print(json.dumps(asdict(of_template(sys.stdin.read()))))
