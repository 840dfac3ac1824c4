# SPDX-License-Identifier: Apache-2.0
"""How engines end: in their own time, when their parent says so, and what they leave behind."""

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

#: Seconds the engine's process may take to end, twice what it took on two busy cores: the step in
#: flight, freeing the model, and Python's own end. vLLM gives ROCm's as many.
STOP_TIMEOUT = 15.0
#: On a Mac: what the GPU uses is wired, and what a process had wired when it was killed may be lost
#: until a reboot (omlx#2184, omlx#2855), so one that is slow to end gets its time.
MAC_STOP_TIMEOUT = 60.0
#: The same of one that has not started: its user waits for the prompt, and it ends with SIGTERM
#: between two weights. On a Mac these may be wired already.
START_STOP_TIMEOUT = 1.0
MAC_START_STOP_TIMEOUT = 5.0
_POLL_MS = 500
_STARTS = "vllm_metal_starts"
_AFTER_A_STOP = "vllm_metal_after_a_stop"
_vllms: list[Any] = []  # vLLM's handler of SIGTERM, while another stands in its place


def let_engines_end() -> None:
    """Gives the engine's process time to end after SIGTERM; call it once vLLM is loaded.

    Where no --shutdown-timeout is set, a server kills the process at once and `LLM` after five
    seconds: two warnings, and semaphores left behind, of which Python warns. Requests are aborted
    either way.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    replace(CoreEngineProcManager, "shutdown", _waiting)


def _waiting(shutdown: Callable[..., None], self: Any, timeout: float | None = None) -> None:
    is_mac = sys.platform == "darwin"
    if getattr(self, _STARTS, False):
        timeout = MAC_START_STOP_TIMEOUT if is_mac else START_STOP_TIMEOUT
    elif self._request_shutdown_timeout == 0:
        timeout = max(timeout or 0.0, MAC_STOP_TIMEOUT if is_mac else STOP_TIMEOUT)
    shutdown(self, timeout=timeout)


def end_interrupted_starts() -> None:
    """Has Ctrl-C end a start at once; call it once vLLM is loaded.

    A terminal sends Ctrl-C to the engine's process as well, which prints a traceback while it
    imports, or notes it and goes on with its start; its parent waits for it. Now the parent alone
    gets it.
    """
    from vllm.v1.engine import utils

    replace(utils.CoreEngineProcManager, "__init__", _without_ctrl_c)
    replace(utils, "wait_for_engine_startup", _noting_a_stop)
    # The signal may reach another thread than the one that waits, and does not end its wait.
    utils.STARTUP_POLL_PERIOD_MS = min(utils.STARTUP_POLL_PERIOD_MS, _POLL_MS)


def _without_ctrl_c(init: Callable[..., None], *args: Any, **options: Any) -> None:
    """Processes that are started meanwhile never get it; this one gets it afterwards."""
    resource_tracker.ensure_running()  # which lets it through, where it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        init(*args, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noting_a_stop(wait: Callable[..., None], *args: Any, **options: Any) -> None:
    try:
        wait(*args, **options)
    except BaseException:
        launch = options.get("launch", args[-1] if args else None)
        if (manager := getattr(launch, "engine_manager", None)) is not None:
            setattr(manager, _STARTS, True)
        raise


def end_with_sigterm() -> None:
    """Has an engine that starts end with SIGTERM; call it in its process, where its start begins.

    vLLM notes the signal, and obeys it once the engine has started.
    """
    if is_engine_process() and threading.current_thread() is threading.main_thread():
        _vllms.append(signal.signal(signal.SIGTERM, _end))


def _end(number: int, frame: Any) -> None:
    raise SystemExit(0)


def leave_ctrl_c_to_the_parent() -> None:
    """Has an engine's process ignore Ctrl-C once the engine is ready; call it in that process.

    A terminal sends Ctrl-C to all processes of a program. The parent decides what it means: a
    server stops its engine by SIGTERM, and takes an engine that ended before that for a failure.
    """
    from vllm.v1.engine.core import EngineCoreProc

    replace(EngineCoreProc, "run_busy_loop", _ignoring_ctrl_c)


def _ignoring_ctrl_c(run_busy_loop: Callable[[Any], None], self: Any) -> None:
    ignore_ctrl_c()
    if _vllms:
        signal.signal(signal.SIGTERM, _vllms.pop())
    run_busy_loop(self)


def skip_pythons_end() -> None:
    """Ends an engine's process without taking down its modules, which is a second of a processor.

    Call it in that process, on a CPU: on a Mac what the GPU has wired is given back meanwhile.
    """
    from vllm.v1.engine.core import EngineCoreProc

    replace(EngineCoreProc, "shutdown", ending_at_once)


def ending_at_once(shutdown: Callable[..., None], self: Any) -> None:
    """Shuts an engine down; if it was told to, its process ends with what is registered at exit."""
    error = sys.exc_info()[1]
    if is_engine_process() and isinstance(error, SystemExit) and not error.code:
        atexit.register(_leave)  # functions are called from the last one on
        gc.freeze()  # vLLM looks for garbage in all that the process has, which goes with it
        setattr(gc, "unfreeze", gc.freeze)  # noqa: B010 - mypy knows the module's own
    shutdown(self)


def _leave() -> None:
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
