# SPDX-License-Identifier: Apache-2.0
"""Plans a server in a child process: the model and context that fit, and the options to set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_metal.cli.fit.judge import FitResult

from vllm_metal.cli import early_checks

#: Minimum context in tokens that leaves room after an agent's instructions and tools. Claude Code's
#: first prompt alone has 12,000 tokens.
LEAST_CONTEXT = 32768


@dataclass(frozen=True)
class ServerPlan:
    """The settings to start a server with."""

    model: str  # a folder, or a name on the hub
    context: int  # tokens of the longest request
    flags: Sequence[str]  # further options of `vllm serve`
    notes: Sequence[str]  # remarks on the choice, one sentence each


def planned(model: str | None, context: int | None) -> ServerPlan:
    """Plans a server for a model on this machine.

    Args:
        model: folder or hub name; None for the largest known model that fits.
        context: tokens of the longest request; None for as many as fit.

    Raises:
        ValueError: the model is not found, not supported, or does not fit.
        ModelLoadError: the model is not found, or damaged.
    """
    if model is not None:
        early_checks.check_model(model)
    else:
        early_checks.check_hub()
    # Planning loads vLLM and MLX. In a child process, their memory is free again for the server,
    # and the command that waits for the client stays small.
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([model, context])],
        stdout=subprocess.PIPE,
        text=True,
        env={"VLLM_LOGGING_LEVEL": "ERROR"} | dict(os.environ),
        start_new_session=True,  # else Ctrl-C makes the child print a traceback
    )
    lines = done.stdout.splitlines()  # libraries may print other lines first
    if done.returncode or not lines:
        raise ValueError(f"the plan for {model or 'a model'} failed; the error is above")
    found = json.loads(lines[-1])
    if isinstance(found, str):
        raise ValueError(found)
    return ServerPlan(**found)


def _plan(model: str | None, context: int | None) -> ServerPlan:
    from vllm_metal.cli.fit import command as fit
    from vllm_metal.engine.weights import folders
    from vllm_metal.identity import model_names
    from vllm_metal.serving.parsers import files
    from vllm_metal.serving.parsers.choice import choose

    answer = fit.find(fit.options_for(model, context))
    if context is None and model is not None and _length(answer) < LEAST_CONTEXT:
        with suppress(ValueError):  # the model's maximum is shorter
            longer = fit.find(fit.options_for(model, LEAST_CONTEXT))
            answer = longer if longer.fits else answer
    length = _length(answer)
    if not answer.fits:
        changes = "; ".join(answer.changes)
        raise ValueError(f"{answer.model} does not fit with {length} tokens of context: {changes}")
    model_names.check(answer.model)  # offline, loading would retry the hub for a minute
    choice = choose(files.read(folders.folder_of(answer.model)))
    remarks = list(choice.lines())
    if length < LEAST_CONTEXT:
        remarks.append(f"The context is {length} tokens; agents need {LEAST_CONTEXT} or more.")
    return ServerPlan(
        answer.model, length, ("--max-model-len", str(length), *choice.flags), remarks
    )


def _length(answer: FitResult) -> int:
    return answer.estimates[answer.cache_dtype].settings.max_model_len


if __name__ == "__main__":
    from vllm_metal.identity.model_files import ModelLoadError
    from vllm_metal.platform import metal_platform  # noqa: F401  # loads a BLAS before MLX

    try:
        print(json.dumps(asdict(_plan(*json.loads(sys.argv[1])))))
    except (ValueError, OSError, ImportError, ModelLoadError) as error:
        print(json.dumps(str(error)))
