# SPDX-License-Identifier: Apache-2.0
"""Renders a chat template to find out whether a model reasons by default."""

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
#: Limits for an untrusted template to render one short chat: CPU time, and memory including
#: transformers. Wall-clock time is limited more loosely, as the machine may be busy.
SECONDS, MOST_BYTES = 10.0, 4 << 30
_WAIT_S = 120.0
_TOO_MUCH_MEMORY = 3  # exit status
#: Variables that transformers passes to templates; their values do not matter here.
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Thinking:
    """How a template renders a request that does not mention reasoning."""

    opened: bool  # the prompt ends inside <think>, so that the model must reason
    by_default: bool  # the prompt equals that of enable_thinking=True, and not that of False


NEVER = Thinking(opened=False, by_default=False)


class EndlessTemplate(ValueError):
    """A chat template exceeds the limits, and would hang the server's start and each request."""


def of_template(template: str) -> Thinking:
    """Examines a template; returns `NEVER` if it has no "think" or cannot be rendered."""
    if "think" not in template:
        return NEVER
    try:
        plain = _prompt(template)
        on, off = (_prompt(template, enable_thinking=enabled) for enabled in (True, False))
    except MemoryError:
        raise
    except Exception:  # templates may raise anything, also to reject a chat
        return NEVER
    return Thinking(
        opened=plain.rfind("<think>") > plain.rfind("</think>"), by_default=plain == on != off
    )


def of_unknown_template(template: str) -> Thinking:
    """Like `of_template`, in a process with limited time and memory, as rendering may not end.

    Raises EndlessTemplate if it exceeds the limits.
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
    # As transformers does, which takes a second to load.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    given = {"messages": _QUESTION, "tools": None, "documents": None, "strftime_now": str}
    environment.from_string(template).render(add_generation_prompt=True, **given, **_TOKENS)


def _main() -> None:
    """Examines the template on standard input within the limits, and prints the result as JSON."""
    with suppress(ValueError, OSError):  # a hard limit may be lower already
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    template = sys.stdin.read()
    if "think" in template:
        # Loaded before the timer starts, as it takes a second.
        from transformers.utils import chat_template_utils  # noqa: F401
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    try:
        if "think" not in template:
            _render_plainly(template)
        print(json.dumps(asdict(of_template(template))))
    except MemoryError:
        sys.exit(_TOO_MUCH_MEMORY)
    except Exception:  # as in `of_template`
        print(json.dumps(asdict(NEVER)))


def _prompt(template: str, **options: Any) -> str:
    # transformers uses jinja's sandbox, as it does for each request.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [_QUESTION], chat_template=template, add_generation_prompt=True, **options | _TOKENS
    )
    return str(rendered[0][0])


if __name__ == "__main__":
    _main()
