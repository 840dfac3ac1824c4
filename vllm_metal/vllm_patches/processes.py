# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's engine runs, and how its process starts, on macOS."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from typing import Any

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def spawn_on_macos() -> None:
    """Has vLLM spawn its processes on macOS, unless VLLM_WORKER_MULTIPROC_METHOD is set.

    vLLM forks by default, with torch and MLX loaded and threads running: Apple's frameworks end
    such a child. Its command line spawns already. The default is changed, not the environment:
    there it would look to child processes like their user's choice.
    """
    if sys.platform != "darwin":
        return
    from vllm import envs

    envs.environment_variables[_METHOD] = envs.env_with_choices(_METHOD, "spawn", ["spawn", "fork"])


def is_engine_process() -> bool:
    """Whether this process is one that vLLM started for an engine."""
    return multiprocessing.current_process().name.startswith("EngineCore")


def in_users_process() -> bool:
    """Whether an engine here is in its user's process without their asking for it."""
    chosen = _MULTIPROCESSING in os.environ
    return sys.platform == "darwin" and not chosen and not is_engine_process()


def stay_in_process_on_macos() -> None:
    """Runs the engine of `LLM` in its own process on macOS, once vLLM is loaded.

    A spawned engine imports the user's script again, which then needs an
    `if __name__ == "__main__":`. Where VLLM_ENABLE_V1_MULTIPROCESSING is set, it decides. Nobody
    sets it here: a server, whose engine is a process in any case, would warn of it.
    """
    if sys.platform != "darwin":
        return
    from vllm.v1.engine.llm_engine import LLMEngine

    init = LLMEngine.__init__
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, multiprocess_mode: bool = False, **options: Any) -> None:
        init(self, *args, multiprocess_mode=multiprocess_mode and not in_users_process(), **options)

    LLMEngine.__init__ = __init__
