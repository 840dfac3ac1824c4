# SPDX-License-Identifier: Apache-2.0
"""Ends engines: with enough time, at their parent's command, and without leftovers."""

# Remove when vLLM waits for its engine, tells a stop from a failure, caches no closures, and its
# cleanup asks the platform. Read against vLLM 0.33.

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from operator import attrgetter
from typing import Any

from vllm_metal.patches.vllm_patches.processes import is_engine_process
from vllm_metal.patches.vllm_patches.replacing import replace

#: Seconds that the engine's process may take to end, twice what it took on two busy cores: for the
#: step in flight, freeing the model, and Python's own end. vLLM allows as many with ROCm.
STOP_TIMEOUT = 15.0
#: On a Mac, GPU memory is wired, and what a killed process had wired may be lost until a reboot
#: (omlx#2184, omlx#2855), so a process gets longer to end.
MAC_STOP_TIMEOUT = 60.0
#: The same for an engine that has not started: its user waits for the prompt, and it ends with
#: SIGTERM between two weights. On a Mac these may be wired already.
START_STOP_TIMEOUT = 1.0
MAC_START_STOP_TIMEOUT = 5.0
_POLL_MS = 500
_IS_STARTING = "vllm_metal_starts"
_AFTER_A_STOP = "vllm_metal_after_a_stop"
_vllm_handlers: list[Any] = []  # vLLM's handler of SIGTERM, while another one replaces it


def let_engines_end() -> None:
    """Gives the engine's process time to end after SIGTERM; call it once vLLM is loaded."""
    # VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS is the user's choice, which vLLM reads. Without it and
    # without --shutdown-timeout, a server kills the process at once and `LLM` after five seconds:
    # that gives two warnings, and leaked semaphores, of which Python warns. Requests are aborted
    # either way.
    from vllm.v1.engine.utils import CoreEngineProcManager

    replace(CoreEngineProcManager, "shutdown", _waiting)


def _waiting(shutdown: Callable[..., None], self: Any, timeout: float | None = None) -> None:
    from vllm import envs

    is_mac = sys.platform == "darwin"
    if getattr(self, _IS_STARTING, False):
        timeout = MAC_START_STOP_TIMEOUT if is_mac else START_STOP_TIMEOUT
    elif envs.is_set("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        pass
    elif self._request_shutdown_timeout == 0:
        timeout = max(timeout or 0.0, MAC_STOP_TIMEOUT if is_mac else STOP_TIMEOUT)
    shutdown(self, timeout=timeout)


def end_interrupted_starts() -> None:
    """Makes Ctrl-C end a start at once; call it once vLLM is loaded."""
    # A terminal sends Ctrl-C to the engine's process as well, which prints a traceback while it
    # imports, or notes it and finishes its start while its parent waits. Now only the parent gets
    # it.
    from vllm.v1.engine import utils

    replace(utils.CoreEngineProcManager, "__init__", _without_ctrl_c)
    replace(utils, "wait_for_engine_startup", _mark_failed_start)
    # The signal may go to another thread than the waiting one, and does not interrupt that wait.
    utils.STARTUP_POLL_PERIOD_MS = min(utils.STARTUP_POLL_PERIOD_MS, _POLL_MS)


def _without_ctrl_c(init: Callable[..., None], *args: Any, **options: Any) -> None:
    # Processes that are started meanwhile never get Ctrl-C; this one gets it afterwards.
    resource_tracker.ensure_running()  # its start unblocks the signal, so it must come before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        init(*args, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mark_failed_start(wait: Callable[..., None], *args: Any, **options: Any) -> None:
    try:
        wait(*args, **options)
    except BaseException:
        launch = options.get("launch", args[-1] if args else None)
        if (manager := getattr(launch, "engine_manager", None)) is not None:
            setattr(manager, _IS_STARTING, True)
        raise


def end_with_sigterm() -> None:
    """Makes SIGTERM end a starting engine; call it in its process when its start begins."""
    # vLLM notes the signal and only obeys it once the engine has started.
    if is_engine_process() and threading.current_thread() is threading.main_thread():
        _vllm_handlers.append(signal.signal(signal.SIGTERM, _end))


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)


def leave_ctrl_c_to_the_parent() -> None:
    """Makes an engine's process ignore Ctrl-C once it is ready; call it in that process."""
    # A terminal sends Ctrl-C to all processes of a program. The parent decides what it means: a
    # server stops its engine by SIGTERM, and takes an engine that ended before that for a failure.
    from vllm.v1.engine.core import EngineCoreProc

    replace(EngineCoreProc, "run_busy_loop", _ignoring_ctrl_c)


def _ignoring_ctrl_c(run_busy_loop: Callable[[Any], None], self: Any) -> None:
    ignore_ctrl_c()
    if _vllm_handlers:
        signal.signal(signal.SIGTERM, _vllm_handlers.pop())
    run_busy_loop(self)


def skip_pythons_end() -> None:
    """Ends an engine's process without unloading modules, which takes a second of CPU time.

    Call it in that process on a CPU only: on a Mac, wired GPU memory is freed meanwhile.
    """
    from vllm.v1.engine.core import EngineCoreProc

    replace(EngineCoreProc, "shutdown", ending_at_once)


def ending_at_once(shutdown: Callable[..., None], self: Any) -> None:
    """Shuts an engine down; if it was told to stop, runs exit functions and ends its process."""
    error = sys.exc_info()[1]
    if is_engine_process() and isinstance(error, SystemExit) and not error.code:
        atexit.register(_leave)  # runs first: functions are called in reverse order
        gc.freeze()  # vLLM collects garbage in the whole heap, which is about to go anyway
        # vLLM's cleanup calls `gc.unfreeze` before it collects.
        setattr(gc, "unfreeze", gc.freeze)  # noqa: B010 - mypy knows the module's own
    shutdown(self)


def _leave() -> None:
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ignore_ctrl_c() -> None:
    """Makes an engine's process that vLLM started ignore Ctrl-C; call it on the main thread."""
    if is_engine_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def silence_stopped_engines() -> None:
    """Makes vLLM's server not log the end of an engine that it stopped itself.

    Call this once vLLM is loaded.
    """
    # The server's task that waits for results gets an EngineDeadError either way, logs its
    # traceback and passes it on to the requests. After a stop it still does the latter.
    from vllm.v1.engine.core_client import MPClient

    replace(MPClient, "shutdown", remembering_the_stop(attrgetter("resources.engine_dead")))
    replace(MPClient, "_format_exception", _marking_the_stop)
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(_is_failure)


def remembering_the_stop(has_failed: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns a `shutdown` that sets the object's `told_to_stop`: False if its engine has died.

    `has_failed` returns whether the engine has died; called at an object's first shutdown.
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
    """Clears a cache of vLLM that keeps the tokenizers of closed engines in memory."""
    # vLLM caches 128 functions that hold copies of them.
    from vllm.utils import func_utils

    func_utils._supports_kw.cache_clear()


def answer_for_torch_accelerator() -> None:
    """Makes torch's functions that empty accelerator caches do nothing, in this process."""
    # vLLM calls them at engine shutdown on every platform but its CPU one. Without a device torch
    # raises; on a Mac (MPS) torch 2.13 follows a null pointer to the allocator of pinned memory and
    # ends the process. There is nothing to empty: the model's memory is MLX's, and vLLM's own
    # tensors are on the CPU.
    import torch

    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)
