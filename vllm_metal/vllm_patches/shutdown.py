# SPDX-License-Identifier: Apache-2.0
"""How engines end: in their own time, when their parent says so, and what they leave behind."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vllm_metal.vllm_patches.processes import is_engine_process
from vllm_metal.vllm_patches.replacing import replace

#: Seconds the engine's process may take to end, twice what it took on two busy cores: the step in
#: flight, freeing the model, and Python's own end. vLLM gives ROCm's as many.
STOP_TIMEOUT = 15.0
_AFTER_A_STOP = "vllm_metal_after_a_stop"


def let_engines_end() -> None:
    """Gives the engine's process time to end after SIGTERM; call it once vLLM is loaded.

    Where no --shutdown-timeout is set, a server kills the process at once and `LLM` after five
    seconds: two warnings, and semaphores left behind, of which Python warns. Requests are aborted
    either way.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    replace(CoreEngineProcManager, "shutdown", _waiting)


def _waiting(shutdown: Callable[..., None], self: Any, timeout: float | None = None) -> None:
    if self._request_shutdown_timeout == 0:
        timeout = max(timeout or 0.0, STOP_TIMEOUT)
    shutdown(self, timeout=timeout)


def leave_ctrl_c_to_the_parent() -> None:
    """Has an engine's process ignore Ctrl-C once the engine is ready; call it in that process.

    A terminal sends Ctrl-C to all processes of a program. The parent decides what it means: a
    server stops its engine by SIGTERM, and takes an engine that ended before that for a failure.
    """
    from vllm.v1.engine.core import EngineCoreProc

    replace(EngineCoreProc, "run_busy_loop", _ignoring_ctrl_c)


def _ignoring_ctrl_c(run_busy_loop: Callable[[Any], None], self: Any) -> None:
    ignore_ctrl_c()
    run_busy_loop(self)


def ignore_ctrl_c() -> None:
    """Has a process that vLLM started for an engine ignore Ctrl-C; call it on the main thread."""
    if is_engine_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def tell_a_stop_from_a_failure() -> None:
    """Has vLLM's server not log the end of an engine that it stopped itself.

    The server's task that waits for results gets an EngineDeadError either way, logs it with its
    traceback and passes it on to the requests. After a stop it still passes the error on, but the
    log leaves it out. Call this once vLLM is loaded.
    """
    from vllm.v1.engine.core_client import MPClient

    replace(MPClient, "shutdown", remembering_the_stop(attrgetter("resources.engine_dead")))
    replace(MPClient, "_format_exception", _marking_the_stop)
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(_is_failure)


def remembering_the_stop(has_failed: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns a `shutdown` that notes as `told_to_stop` whether it ends what still worked.

    Args:
        has_failed: says of the object, when it is first told to shut down, whether its engine died.
    """

    def shut_down(shutdown: Callable[..., None], self: Any, timeout: float | None = None) -> None:
        if not hasattr(self, "told_to_stop"):
            self.told_to_stop = not has_failed(self)
        shutdown(self, timeout=timeout)

    return shut_down


def _marking_the_stop(
    format_exception: Callable[[Any, Exception], Exception], self: Any, error: Exception
) -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError

    formatted = format_exception(self, error)
    if isinstance(formatted, EngineDeadError) and getattr(self, "told_to_stop", False):
        setattr(formatted, _AFTER_A_STOP, True)
    return formatted


def _is_failure(record: logging.LogRecord) -> bool:
    return not (record.exc_info and getattr(record.exc_info[1], _AFTER_A_STOP, False))


def forget_tokenizers() -> None:
    """Lets go of closed engines' tokenizers: vLLM remembers 128 functions that hold copies of them.

    What is still in use is looked up once more.
    """
    from vllm.utils import func_utils

    func_utils._supports_kw.cache_clear()


def answer_for_torch_accelerator() -> None:
    """Makes torch's functions that empty accelerator caches do nothing, in this process.

    vLLM calls them at engine shutdown on every platform but its own CPU one. Without a device torch
    raises there; with a Mac's (MPS) torch 2.13 follows a null pointer to the allocator of pinned
    memory and ends the process. There is nothing to empty: the model's memory is MLX's, and vLLM's
    own tensors are on the CPU.
    """
    import torch

    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)
