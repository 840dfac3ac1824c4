# SPDX-License-Identifier: Apache-2.0
"""Plans a server in a process of its own: what fits, and what the model's files call for.

It loads vLLM and MLX, whose memory the server needs: `planned` runs this module and reads what it
prints, so that the command that waits for the client stays small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: Tokens that an agent's instructions and tools leave room in: Claude Code's first prompt has
#: 12,000 by itself.
LEAST_CONTEXT = 32768


@dataclass(frozen=True)
class Planned:
    """What a server is started with."""

    model: str  # a folder, or a name on the hub
    context: int  # tokens of the longest request
    flags: Sequence[str]  # more of `vllm serve`
    said: Sequence[str]  # what there is to say of the choice, a sentence each


def planned(model: str | None, context: int | None) -> Planned:
    """The plan for a model on this machine.

    Args:
        model: a folder, or a name on the hub; None: the largest known one that fits.
        context: tokens of the longest request; None: what fits.

    Raises:
        ValueError: the model is not found, is refused, or does not fit.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([model, context])],
        stdout=subprocess.PIPE,
        text=True,
        env={"VLLM_LOGGING_LEVEL": "ERROR"} | dict(os.environ),
    )
    lines = done.stdout.splitlines()  # what libraries print comes before
    if done.returncode or not lines:
        raise ValueError(f"the plan for {model or 'a model'} failed; the error is above")
    found = json.loads(lines[-1])
    if isinstance(found, str):
        raise ValueError(found)
    return Planned(**found)


def _plan(model: str | None, context: int | None) -> Planned:
    from vllm_metal.commands.fit import command as fit
    from vllm_metal.serving.parsers import files
    from vllm_metal.serving.parsers.choice import choose

    answer = fit.find(fit.question(model, context))
    length = answer.estimates[answer.asked].settings.max_model_len
    if not answer.fits:
        changes = "; ".join(answer.changes)
        raise ValueError(f"{answer.model} does not fit with {length} tokens of context: {changes}")
    choice = choose(files.read(answer.model))
    said = list(choice.lines())
    if length < LEAST_CONTEXT:
        said.append(
            f"The context has {length} tokens, and agents are made for {LEAST_CONTEXT} and more."
        )
    return Planned(answer.model, length, ("--max-model-len", str(length), *choice.flags), said)


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_plan(*json.loads(sys.argv[1])))))
    except (ValueError, OSError, ImportError) as error:
        print(json.dumps(str(error)))
