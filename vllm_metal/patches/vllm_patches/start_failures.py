# SPDX-License-Identifier: Apache-2.0
"""Ends a failed start with one line that names the cause, as the last one.

vLLM prints the tracebacks of the engine's process and of its own, and its last line names no cause.
Here the engine's process leaves the cause in a file for its parent, and tracebacks go to the log's
file. A traceback stays visible if the error is no user's mistake.
"""

# Remove when the last line of a failed start names the cause. Read against vLLM 0.33.

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil
from pydantic import ValidationError

from vllm_metal.patches.vllm_patches import known_causes, refused_arguments, start_log
from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.settings import log_files

#: Errors that these packages raise for users' input; from other packages they are programs' faults.
_USERS = (ValueError, OSError, ImportError, NotImplementedError, TimeoutError)
_SPEAK_TO_USERS = ("huggingface_hub", "metal_kernels", "pydantic", "transformers", "vllm")
#: Errors that are users' mistakes if raised by one of vLLM's modules that check users' input.
_PERHAPS = (AssertionError, KeyError, RuntimeError, TypeError)
_CHECKS = (
    *("vllm.config", "vllm.engine.arg_utils", "vllm.entrypoints", "vllm.utils.argparse_utils"),
    *("vllm.reasoning", "vllm.tool_parsers"),
)
_READS_CONFIGS = "transformers"  # and raises KeyError for missing keys
_CLASSES = ("huggingface_hub.", "vllm.exceptions")  # errors that are users' mistakes
_OURS = "vllm_metal"
#: Beginning of the line that says why a `vllm` command ends.
ERROR_PREFIX = "vllm: error: "
_INTERRUPTED = "vllm: interrupted"
#: Messages of vLLM that mean that another process has given the cause.
_ELSEWHERE = ("Engine core initialization failed", "WorkerProc initialization failed")
_IN_A_WORKER = "Worker failed with error"  # followed by that error's message
#: Maps options to the choices that are supported here, a subset of vLLM's.
_SERVED: dict[str, Sequence[str]] = {}
#: How an engine logs a failed call of another process; that process gets the message.
_CALL_FAILED = "method failed"
_PARSING = "Error parsing config for "  # logged by vLLM for each attempt
_STARTS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
#: Words in vLLM's logs of an engine or worker that ends, or of a worker's failed call.
_FAILED_START, _FAILED = "failed to start", ("encountered a fatal error", "hit an exception")
_dead: list[str] = []  # why the newest engine of this process ended, if known


class StartError(ValueError):
    """A start failed for a known cause: the message is one line, with the remedy."""


def cause(error: BaseException) -> str | None:
    """Returns one line that explains an error that ended a start; None for a bug.

    A bug's traceback should be shown instead.
    """
    if isinstance(error, ValidationError):
        return known_causes.of_fields(error)
    if (message := known_causes.of_message(error)) is not None:
        return message
    if str(error).startswith(_ELSEWHERE):
        return _take_cause()
    if (words := " ".join(str(error).split())).startswith(_IN_A_WORKER):
        # A worker also leaves the cause of an earlier call that failed without ending anything.
        return line if (line := _take_cause()) is not None and line in words else None
    if _package(type(error).__module__) == _OURS:
        return words
    return known_causes.in_one_line(error) or None if _was_raised_for_users(error) else None


def _was_raised_for_users(error: BaseException) -> bool:
    # Errors from the system, or from code that checks users' input.
    if isinstance(error, OSError) and error.errno is not None:
        return True
    if type(error).__module__.startswith(_CLASSES):
        return True
    module = known_causes.raised_in(error)
    if isinstance(error, _USERS):
        return _package(module) in (_OURS, *_SPEAK_TO_USERS)
    # A single word is a key that some code did not find; a sentence was written for somebody.
    kinds = KeyError if _package(module) == _READS_CONFIGS else _PERHAPS
    checks = (*_CHECKS, _READS_CONFIGS)
    return isinstance(error, kinds) and module.startswith(checks) and " " in str(error)


def _package(module: str) -> str:
    return module.partition(".")[0]


def name_causes() -> None:
    """Makes a failed start raise a `StartError` in the process that requested it.

    An engine that ends later, as after its handshake, raises vLLM's error with the cause. Call this
    once vLLM is loaded.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import registry
    from vllm.transformers_utils import config
    from vllm.v1.engine import utils
    from vllm.v1.engine.exceptions import EngineDeadError

    replace(EngineArgs, "create_engine_config", _dropping_old_cause)
    replace(config, "with_retry", _once_for_folders)
    replace(registry, "cached_tokenizer_from_config", _naming_the_tokenizer)
    replace(utils, "wait_for_engine_startup", _in_one_line)
    replace(EngineDeadError, "__init__", _with_the_cause)


def _dropping_old_cause(create: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _dead.clear()
    _take_cause()  # an earlier engine's
    return _in_one_line(create, *args, **options)


def _with_the_cause(init: Callable[..., None], self: Exception, *args: Any, **options: Any) -> None:
    init(self, *args, **options)
    if (line := _take_cause()) is not None:
        _dead[:] = [line]
    if _dead:
        self.args = (_dead[0],)


def _in_one_line(start: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return start(*args, **options)
    except Exception as error:
        if isinstance(error, StartError) or (line := cause(error)) is None:
            raise
        raise StartError(line) from None


def _once_for_folders(
    retry: Callable[..., Any], act: Callable[[], Any], message: str, *args: Any, **options: Any
) -> Any:
    # A folder's files do not change, so it is read once, and the error is raised without a log.
    _, parsing, model = message.partition(_PARSING)
    if parsing and Path(model).expanduser().is_dir():
        return act()
    return retry(act, message, *args, **options)


def _naming_the_tokenizer(load: Callable[..., Any], config: Any, **options: Any) -> Any:
    # Whatever transformers fails at, the files are not what it expects.
    try:
        return load(config, **options)
    except Exception as error:
        why = cause(error) or " ".join(f"{type(error).__name__}: {error}".split())
        raise StartError(
            f"the tokenizer of {config.tokenizer} cannot be read ({why}): download its files again,"
            " or name another folder by --tokenizer"
        ) from None


def leave_causes() -> None:
    """Makes a process of an engine report the cause of its failure to its parent."""
    for name in _STARTS:
        logging.getLogger(name).addFilter(_leave_cause)  # adding the same filter twice is a no-op


def _leave_cause(record: logging.LogRecord) -> bool:
    """Returns False for a failure with a known cause, whose message is not to be shown.

    Raises SystemExit: the start failed; this process would print the same traceback once more.
    """
    error, message = record.exc_info[1] if record.exc_info else None, str(record.msg)
    starts, ends = _FAILED_START in message, any(each in message for each in _FAILED)
    if error is None or not (starts or ends or message.endswith(_CALL_FAILED)):
        return True
    if (line := cause(error)) is None:
        return True
    if starts or ends:
        with suppress(OSError):
            log_files.write(_cause_file(os.getppid()), json.dumps(line))
    if ends or start_log.chosen_by_the_user():
        return True
    log_files.append(record)
    if starts:
        raise SystemExit(1)
    return False


def _take_cause() -> str | None:
    # Reads the cause that a child process has left.
    file = _cause_file(os.getpid())
    try:
        if file.stat().st_mtime < psutil.Process().create_time():  # for an earlier process
            return None
        line: str = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    file.unlink(missing_ok=True)
    return line


def _cause_file(parent: int) -> Path:
    return log_files.folder() / f"cause-{parent}.json"


def end_commands_with_one_line(served: Mapping[str, Sequence[str]]) -> None:
    """Makes a `vllm` command that fails end with one line, the cause, and exit status 1.

    `served` maps options to the choices that are supported here, a subset of vLLM's.
    """
    print_causes()
    from vllm.entrypoints.launchers import launcher
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _SERVED.update(served)
    replace(launcher, "create_server_socket", _naming_the_port)
    replace(launcher, "create_server_unix_socket", _naming_the_path)
    replace(FlexibleArgumentParser, "error", _refuse)


def print_causes() -> None:
    """Makes an error that ends this process print only its cause, if that is known."""
    sys.excepthook = _print_cause


def _print_cause(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(_INTERRUPTED, file=sys.stderr)
        return
    if (line := cause(error)) is None:
        sys.__excepthook__(kind, error, where)
        return
    log_files.append_error(error)
    _print_reason(line)


def _naming_the_port(
    create: Callable[..., socket.socket], address: tuple[str, int], **options: Any
) -> socket.socket:
    try:
        return create(address, **options)
    except OSError as error:
        host, port = address
        why = f"cannot listen on --host={host} --port={port} ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is in use{_by(port)}: stop that program, or choose another --port"
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            why = f"--host={host} is not an address of this machine: choose 127.0.0.1, or 0.0.0.0"
        raise StartError(why) from None


def _naming_the_path(create: Callable[..., socket.socket], path: str) -> socket.socket:
    try:
        return create(path)
    except OSError as error:
        why = f"cannot listen on --uds={path} ({error.strerror}): choose another path"
        raise StartError(why) from None


def _by(port: int) -> str:
    # macOS does not report the processes of other users.
    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f" by {psutil.Process(found.pid).name()} (process {found.pid})"
    return ""


def _print_reason(line: str) -> None:
    """Prints why a command ends; its first line has named the log."""
    print(ERROR_PREFIX + line, file=sys.stderr)


def _refuse(refuse: Callable[..., NoReturn], self: Any, message: str) -> NoReturn:
    # Without argparse's whole usage, and with a remedy.
    command = refused_arguments.of_command(self, next(iter(sys.argv[1:]), None))
    _print_reason(refused_arguments.explain(command, message, _SERVED))
    raise SystemExit(1)
