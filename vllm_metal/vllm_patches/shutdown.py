# SPDX-License-Identifier: Apache-2.0
"""How the engine's process ends: by itself, when it is told to, and without an alarm."""

from __future__ import annotations

import functools
import logging
import signal
from typing import Any

from vllm_metal.vllm_patches.processes import is_engine_process

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")
#: Seconds the engine's process may take to end, twice what it took on two busy cores: the step in
#: flight, letting go of the model, and Python's own end. vLLM gives ROCm's as many.
STOP_TIMEOUT = 15.0


def let_engines_end() -> None:
    """Gives the engine's process time to end after SIGTERM; once vLLM is loaded.

    Where no --shutdown-timeout is set, a server kills it in the same moment and `LLM` after five
    seconds: two warnings, and semaphores left behind, of which Python warns. Requests are aborted
    either way.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    shutdown = CoreEngineProcManager.shutdown
    if hasattr(shutdown, "__wrapped__"):
        return

    @functools.wraps(shutdown)
    def wait(self: Any, timeout: float | None = None) -> None:
        if self._request_shutdown_timeout == 0:
            timeout = max(timeout or 0.0, STOP_TIMEOUT)
        shutdown(self, timeout=timeout)

    CoreEngineProcManager.shutdown = wait  # type: ignore[method-assign]


def leave_ctrl_c_to_the_parent() -> None:
    """Has an engine's process not heed Ctrl-C once it is ready; on its main thread.

    A terminal sends Ctrl-C to all processes. What it means is for the parent to say: a server stops
    its engine by SIGTERM, and takes one that ended before for a failure.
    """
    if is_engine_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def tell_a_stop_from_a_failure() -> None:
    """Has vLLM's server not log a dead engine that it stopped itself; once vLLM is loaded.

    Its task that waits for results gets an EngineDeadError either way, logs it with its traceback
    and passes it on to the requests. After a stop it is still passed on, but not logged.
    """
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    shutdown, format_exception = MPClient.shutdown, MPClient._format_exception
    if hasattr(shutdown, "__wrapped__"):
        return

    class EngineStopped(EngineDeadError):
        """The engine has ended because it was told to."""

    @functools.wraps(shutdown)
    def shut_down(self: Any, timeout: float | None = None) -> None:
        if self._finalizer.alive:
            self.told_to_stop = not self.resources.engine_dead
        shutdown(self, timeout)

    def _format_exception(self: Any, error: Exception) -> Exception:
        formatted = format_exception(self, error)
        if isinstance(formatted, EngineDeadError) and getattr(self, "told_to_stop", False):
            return EngineStopped(suppress_context=True)
        return formatted

    def is_failure(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineStopped))

    MPClient.shutdown = shut_down  # type: ignore[method-assign]
    MPClient._format_exception = _format_exception  # type: ignore[method-assign, assignment]
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(is_failure)
