# SPDX-License-Identifier: Apache-2.0
"""Finds out by rendering a chat template whether models think where a request does not say so."""

from __future__ import annotations

import json
import logging
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger(__name__)

_QUESTION = [{"role": "user", "content": "?"}]
#: That a template from a stranger may take to render so short a chat: processor time, and memory
#: with transformers loaded. A machine with much else to do gets more time by the clock.
SECONDS, MOST_BYTES = 10.0, 4 << 30
_WAIT_S = 120.0
_TOO_MUCH_MEMORY = 3  # exit status
#: Variables that transformers hands a template; what they hold does not matter here.
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Thinking:
    """What a template does for a request that says nothing of thinking."""

    opened: bool  # the prompt ends inside of <think>, so that the model begins with a thought
    by_default: bool  # the prompt is that of enable_thinking=True, and not that of False


NEVER = Thinking(opened=False, by_default=False)


class EndlessTemplate(ValueError):
    """A chat template that takes any time or memory, in a start and in each request."""


def of_template(template: str) -> Thinking:
    """What a template does; `NEVER` where there is none, or it does not render so short a chat."""
    if "think" not in template:
        return NEVER
    try:
        plain = _prompt(template)
        on, off = (_prompt(template, enable_thinking=asked) for asked in (True, False))
    except MemoryError:
        raise
    except Exception:  # a template may raise anything, and refuses chats in ways of its own
        return NEVER
    return Thinking(
        opened=plain.rfind("<think>") > plain.rfind("</think>"), by_default=plain == on != off
    )


def of_unknown_template(template: str) -> Thinking:
    """As `of_template`, within bounds of time and memory: in a process of its own.

    A template is a program, which may have no end.

    Raises:
        EndlessTemplate: it is beyond them.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(SECONDS)],
            input=template,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_WAIT_S,
        )
    except subprocess.TimeoutExpired:
        logger.warning(
            "The chat template was not rendered within %g s, so whether the model reasons "
            "by default is unknown: pass --reasoning-parser if it does",
            _WAIT_S,
        )
        return NEVER
    if done.returncode in (-signal.SIGPROF, _TOO_MUCH_MEMORY):
        raise EndlessTemplate(
            f"the model's chat template takes more than {SECONDS:g} s or "
            f"{MOST_BYTES / 1e9:.1f} GB to render one short message: pass another with "
            "--chat-template"
        )
    try:
        return Thinking(**json.loads(done.stdout))
    except (ValueError, TypeError):
        return NEVER


def _render_plainly(template: str) -> None:
    """Renders as transformers does, without the second that loading it takes."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    given = {"messages": _QUESTION, "tools": None, "documents": None, "strftime_now": str}
    environment.from_string(template).render(add_generation_prompt=True, **given, **_TOKENS)


def _main() -> None:
    """Prints what a template on standard input does, within the bounds."""
    with suppress(ValueError, OSError):  # where a hard limit is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    template = sys.stdin.read()
    if "think" in template:
        from transformers.utils import chat_template_utils  # noqa: F401  # takes a second
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    try:
        if "think" not in template:
            _render_plainly(template)
        print(json.dumps(asdict(of_template(template))))
    except MemoryError:
        sys.exit(_TOO_MUCH_MEMORY)
    except Exception:  # as of_template
        print(json.dumps(asdict(NEVER)))


def _prompt(template: str, **options: Any) -> str:
    # transformers compiles templates in jinja's sandbox, as it does for each request.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [_QUESTION], chat_template=template, add_generation_prompt=True, **options | _TOKENS
    )
    return str(rendered[0][0])


if __name__ == "__main__":
    _main()
