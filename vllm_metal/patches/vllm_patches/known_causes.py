# SPDX-License-Identifier: Apache-2.0
"""Explains errors of vLLM and of libraries to the user of a command, in one line each.

An unknown message stays as it is, except that field names become options.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from pydantic import ValidationError

_FULL = "the disk is full: free some space, or name another folder by VLLM_METAL_CACHE and HF_HOME"
#: Patterns of how messages begin, and their explanations, which take the pattern's groups.
_MESSAGES: tuple[tuple[str, Callable[..., str]], ...] = (
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
        r"\(\w+=(\d+)",
        lambda given, most: (
            f"--max-model-len={given} is longer than the model's maximum of {most} tokens: "
            "choose that or less, or extend RoPE with --hf-overrides; "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows it as it is"
        ),
    ),
    (
        r"The supplied chat template string \((.*?)\) appears path-like",
        lambda given: f"--chat-template={given}: there is no such file",
    ),
    (
        r"Config file must be of a yaml/yml type",
        lambda: "--config takes a file whose name ends in .yaml or .yml",
    ),
    (
        r"\('Could not load logging config. File does not exist: %s', '(.*)'\)",
        lambda given: f"--log-config-file={given}: there is no such file",
    ),
    (
        r"[\s\S]*\(os error 28\)",  # errors of Rust libraries
        lambda: _FULL,
    ),
    (
        r"The checkpoint you are trying to load has model type `(.*?)` but",
        lambda name: (
            f"model_type={name!r} of config.json is not supported: no family that is served has "
            "it. Choose a checkpoint of a family in docs/models.md"
        ),
    ),
    (
        r"Validation error for field '(\w+)':\s+\w+: Field '\w+' expected (.*)",
        lambda name, why: f"{name} of config.json, or of --hf-overrides: expected {why}",
    ),
    (
        r"Class validation error for validator '\w+':\s+\w+: (.*)",
        lambda why: f"config.json is invalid: {why}",
    ),
    (
        r"Total number of attention heads \((\d+)\) must be divisible by tensor parallel size "
        r"\((\d+)\)",
        lambda heads, size: (
            f"--tensor-parallel-size={size} does not divide the model's {heads} heads: choose one "
            "that does"
        ),
    ),
    (
        r"Unknown attention backend: '(.*?)'",
        lambda name: f"--attention-backend={name} is not supported: leave it out",
    ),
    (
        r"Call to \w+ method failed: ([\s\S]*)",  # the server's report of the engine's error
        lambda why: " ".join(why.split()),
    ),
    (
        r"'rope_type'\Z",
        lambda: (
            "rope_parameters have no rope_type: add one, such as yarn, to rope_parameters "
            "of --hf-overrides or config.json"
        ),
    ),
)
_YAML = "yaml."
_LOGGER = "vllm.logger"  # reads --log-config-file


def of_message(error: BaseException) -> str | None:
    """Explains an error with a known message; None for others."""
    text = str(error)
    for pattern, line in _MESSAGES:
        if found := re.match(pattern, text):
            return line(*found.groups())
    if raised_in(error) == "vllm.envs" and (name := _variable(text)):
        return f"{name}={os.environ[name]} cannot be read: {text}"
    if isinstance(error, ValueError) and _LOGGER in _modules(error):
        return f"--log-config-file cannot be used: {' '.join(text.split())}"
    if type(error).__module__.startswith(_YAML):
        return f"--config is not YAML: {' '.join(text.split())}"
    if isinstance(error, OSError) and error.filename is not None:
        return _explain_os_error(error)
    return None


def _variable(text: str) -> str | None:
    # The variable of vLLM with the value that a message quotes.
    quoted = re.search(r"'([^']*)'$", text)
    names = (name for name, value in os.environ.items() if quoted and value == quoted[1])
    return next((name for name in names if name.startswith("VLLM_")), None)


def _explain_os_error(error: OSError) -> str:
    file = error.filename
    if error.errno == errno.ENOENT:
        return f"there is no file {file}"
    if error.errno == errno.ENOSPC:
        return f"{_FULL} ({file})"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            f"{file} cannot be written or read ({error.strerror}): set the environment variables "
            "VLLM_METAL_CACHE, and HF_HOME for models, to your own folders"
        )
    return f"{file}: {error.strerror}"


def of_fields(error: ValidationError) -> str:
    """Returns what pydantic found wrong, one clause per field."""
    clauses: dict[str, str] = {}
    option = _option_of(error.title)
    for part in error.errors(include_url=False):
        raised = part.get("ctx", {}).get("error")
        if raised is not None:
            clauses.setdefault(str(raised), of_message(raised) or in_one_line(raised))
            continue
        # For a union, the name is followed by that of each of its types.
        name = next((str(at) for at in part["loc"] if isinstance(at, str)), "")
        if name and option and as_written(name) == name:
            name = f"{option}: {name}"
        given = f"{as_written(name)}={part['input']!r}: " if name else ""
        clauses.setdefault(name, f"{given}{_advice(part)}")
    return "; ".join(clauses.values())


def _option_of(title: str) -> str:
    """The option or argument that sets one of vLLM's configuration classes; "" if there is none."""
    from vllm.engine.arg_utils import EngineArgs

    names = (name for name in EngineArgs.__dataclass_fields__ if name.endswith("_config"))
    wanted = title.lower()
    return as_written(next((name for name in names if name.replace("_", "") == wanted), ""))


def _advice(part: Any) -> str:
    if part["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return "there is no such key"
    return str(part["msg"]).replace("Input should be", "it must be")


def in_one_line(error: BaseException) -> str:
    """Returns an error's message in one line; in vLLM's messages, field names become options."""
    words = error.args[0] if isinstance(error, KeyError) and error.args else error  # no quotes
    text = " ".join(str(words).split())
    return text if raised_in(error).startswith("vllm_metal.") else as_written(text)


def raised_in(error: BaseException) -> str:
    """Returns the module that raised an error."""
    return next(iter(_modules(error)[::-1]), "")


def _modules(error: BaseException) -> list[str]:
    """Returns the modules that an error passed through, outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]


def as_written(text: str) -> str:
    """Replaces vLLM's field names in a text by the options of a command."""
    if not _is_command():
        return text
    return _fields().sub(lambda found: "--" + found[0].replace("_", "-"), text)


def _is_command() -> bool:
    return sys.argv[1:2] == ["serve"]


@cache
def _fields() -> re.Pattern[str]:
    # Single-word fields are left out: they are ordinary words as well.
    from vllm.engine.arg_utils import EngineArgs

    names = [name for name in EngineArgs.__dataclass_fields__ if "_" in name]
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(longest_first)})(?![\w.(])")
