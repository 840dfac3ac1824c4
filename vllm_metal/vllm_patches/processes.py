# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's engine runs, how its process starts, and how it ends."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from typing import Any

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
#: Seconds an engine's process may take to end: a step in flight takes some, letting go of a model
#: less than one.
STOP_TIMEOUT = 10.0


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
        in_process = _MULTIPROCESSING not in os.environ
        init(self, *args, multiprocess_mode=multiprocess_mode and not in_process, **options)

    LLMEngine.__init__ = __init__


def wait_for_engines_to_end() -> None:
    """Gives the engine's process time to end after it was told to, once vLLM is loaded.

    A server stopped without a --shutdown-timeout kills it in the same moment, which leaves
    semaphores behind that Python warns of. What runs is aborted either way.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    shutdown = CoreEngineProcManager.shutdown
    if hasattr(shutdown, "__wrapped__"):
        return

    @functools.wraps(shutdown)
    def wait(self: Any, timeout: float | None = None) -> None:
        at_once = timeout == 0 and self._request_shutdown_timeout == 0
        shutdown(self, timeout=STOP_TIMEOUT if at_once else timeout)

    CoreEngineProcManager.shutdown = wait  # type: ignore[method-assign]


def leave_ctrl_c_to_the_parent() -> None:
    """Has the engine's process, where it is one of its own, not heed Ctrl-C; on its main thread.

    A terminal sends Ctrl-C to all processes. What it means is for the parent to say: a server stops
    its engine by SIGTERM, and takes one that ended before for a failure.
    """
    if multiprocessing.current_process().name.startswith("EngineCore"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
