# SPDX-License-Identifier: Apache-2.0
"""Chooses the process of vLLM's engine, and how it starts, on macOS."""

# Remove when vLLM spawns on macOS by itself. Read against vLLM 0.33.

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def spawn_on_macos() -> None:
    """Makes vLLM spawn its processes on macOS, unless VLLM_WORKER_MULTIPROC_METHOD is set."""
    # vLLM forks by default, with torch and MLX loaded and threads running: Apple's frameworks kill
    # such a child. vLLM's command line already spawns. This changes vLLM's default and not the
    # environment, where child processes would take a variable for the user's choice.
    if sys.platform == "darwin":
        spawn()


def spawn() -> None:
    """Makes vLLM spawn the processes that the current one starts from now on."""
    # An engine with several workers needs it on every system: a worker forked from an engine's
    # process waits forever for MLX's threads, which it does not have.
    from vllm import envs

    envs.environment_variables[_METHOD] = envs.env_with_choices(_METHOD, "spawn", ["spawn", "fork"])


def is_engine_process() -> bool:
    """Returns whether vLLM started this process for an engine, or for one of its workers."""
    return multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker"))


def in_users_process() -> bool:
    """Returns whether the engine shares the process of `LLM` or the server: macOS's default."""
    chosen = "VLLM_ENABLE_V1_MULTIPROCESSING" in os.environ
    return sys.platform == "darwin" and not chosen and not is_engine_process()


def stay_in_process_on_macos() -> None:
    """Runs the engine of `LLM` in its user's process on macOS; call it once vLLM is loaded."""
    # vLLM gives the engine its own process. A spawned one imports the user's script again, which
    # then needs an `if __name__ == "__main__":`. VLLM_ENABLE_V1_MULTIPROCESSING takes precedence;
    # it is not set here, as a server, whose engine always has its own process, would warn of it.
    if sys.platform != "darwin":
        return
    from vllm.v1.engine.llm_engine import LLMEngine

    replace(LLMEngine, "__init__", _init_in_users_process)


def _init_in_users_process(
    init: Callable[..., None], *args: Any, multiprocess_mode: bool = False, **options: Any
) -> None:
    init(*args, multiprocess_mode=multiprocess_mode and not in_users_process(), **options)
