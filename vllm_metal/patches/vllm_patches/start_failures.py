# SPDX-License-Identifier: Apache-2.0
"""How a start that fails ends: with one line that names the cause, as the last one.

vLLM prints the traceback of the engine's process and its own, and its last line names no cause.
Here the engine's process leaves the cause in a file for the process that started it, and tracebacks
go to the log's file. What is no user's mistake keeps its traceback.
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

#: Packages that raise these errors for what a user gave; elsewhere they are faults of a program.
_USERS = (ValueError, OSError, ImportError, NotImplementedError, TimeoutError)
_SPEAK_TO_USERS = ("huggingface_hub", "metal_kernels", "pydantic", "transformers", "vllm")
#: Errors that are a user's where one of vLLM's modules raises them that check what users give.
_PERHAPS = (AssertionError, KeyError, RuntimeError, TypeError)
_CHECKS = (
    *("vllm.config", "vllm.engine.arg_utils", "vllm.entrypoints", "vllm.utils.argparse_utils"),
    *("vllm.reasoning", "vllm.tool_parsers"),
)
_READS_CONFIGS = "transformers"  # and raises KeyError for what is missing in them
_CLASSES = ("huggingface_hub.", "vllm.exceptions")  # of errors that are always a user's
_OURS = "vllm_metal"
#: How the line begins that says why a `vllm` command ends.
ERROR_PREFIX = "vllm: error: "
_INTERRUPTED = "vllm: interrupted"
#: How vLLM says that the cause was said before, in another process.
_ELSEWHERE = ("Engine core initialization failed", "WorkerProc initialization failed")
_IN_A_WORKER = "Worker failed with error"  # and the words of that error
#: Choices of options that are served here, of those that vLLM has.
_SERVED: dict[str, Sequence[str]] = {}
#: How an engine logs a call of another process that failed; that process gets the message.
_CALL_FAILED = "method failed"
_PARSING = "Error parsing config for "  # what vLLM tries several times says so
_STARTS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
#: How vLLM logs that an engine or a worker ends, or that a worker's call failed.
_FAILED_START, _FAILED = "failed to start", ("encountered a fatal error", "hit an exception")
_dead: list[str] = []  # why the newest engine of this process ended, where that is known


class StartError(ValueError):
    """A start failed for a known cause: the message is one line, with the remedy."""


def cause(error: BaseException) -> str | None:
    """What a user is told of an error that ended a start.

    Returns:
        One line; None where the error is a fault of a program, whose traceback is wanted.
    """
    if isinstance(error, ValidationError):
        return known_causes.of_fields(error)
    if (told := known_causes.of_message(error)) is not None:
        return told
    if str(error).startswith(_ELSEWHERE):
        return _taken()
    if (words := " ".join(str(error).split())).startswith(_IN_A_WORKER):
        # Of a call that failed before, and ended nothing, a worker has left the cause, too.
        return line if (line := _taken()) is not None and line in words else None
    if _package(type(error).__module__) == _OURS:
        return words
    return known_causes.in_one_line(error) or None if _was_raised_for_users(error) else None


def _was_raised_for_users(error: BaseException) -> bool:
    """Whether it comes from the system, or from code that checks what users give."""
    if isinstance(error, OSError) and error.errno is not None:
        return True
    if type(error).__module__.startswith(_CLASSES):
        return True
    place = known_causes.raised_in(error)
    if isinstance(error, _USERS):
        return _package(place) in (_OURS, *_SPEAK_TO_USERS)
    # A word alone is a key that some code did not find; a sentence was written for somebody.
    kinds = KeyError if _package(place) == _READS_CONFIGS else _PERHAPS
    checks = (*_CHECKS, _READS_CONFIGS)
    return isinstance(error, kinds) and place.startswith(checks) and " " in str(error)


def _package(module: str) -> str:
    return module.partition(".")[0]


def name_causes() -> None:
    """Has a failed start raise a `StartError` in the process that asked for it.

    An engine that ends later, such as behind its handshake, raises vLLM's error with the cause.
    Call this once vLLM is loaded.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import registry
    from vllm.transformers_utils import config
    from vllm.v1.engine import utils
    from vllm.v1.engine.exceptions import EngineDeadError

    replace(EngineArgs, "create_engine_config", _of_a_new_engine)
    replace(config, "with_retry", _once_for_folders)
    replace(registry, "cached_tokenizer_from_config", _naming_the_tokenizer)
    replace(utils, "wait_for_engine_startup", _in_one_line)
    replace(EngineDeadError, "__init__", _with_the_cause)


def _of_a_new_engine(create: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _dead.clear()
    _taken()  # an earlier engine's
    return _in_one_line(create, *args, **options)


def _with_the_cause(init: Callable[..., None], self: Exception, *args: Any, **options: Any) -> None:
    init(self, *args, **options)
    if (line := _taken()) is not None:
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
    retry: Callable[..., Any], act: Callable[[], Any], told: str, *args: Any, **options: Any
) -> Any:
    """Reads a folder once: its files stay as they are, and the error is raised without a log."""
    _, parsing, model = told.partition(_PARSING)
    if parsing and Path(model).expanduser().is_dir():
        return act()
    return retry(act, told, *args, **options)


def _naming_the_tokenizer(load: Callable[..., Any], config: Any, **options: Any) -> Any:
    """Whatever transformers stumbles over, its files are not as it knows them."""
    try:
        return load(config, **options)
    except Exception as error:
        why = cause(error) or " ".join(f"{type(error).__name__}: {error}".split())
        raise StartError(
            f"the tokenizer of {config.tokenizer} cannot be read ({why}): download its files again,"
            " or name another folder by --tokenizer"
        ) from None


def leave_causes() -> None:
    """Has a process that is started for an engine leave its parent why that failed."""
    for name in _STARTS:
        logging.getLogger(name).addFilter(_leave)  # of one filter a logger adds no second


def _leave(record: logging.LogRecord) -> bool:
    """Whether a message is to be shown: not a failure whose cause is known.

    Raises:
        SystemExit: the start failed; this process would print the same traceback once more.
    """
    error, message = record.exc_info[1] if record.exc_info else None, str(record.msg)
    starts, ends = _FAILED_START in message, any(each in message for each in _FAILED)
    if error is None or not (starts or ends or message.endswith(_CALL_FAILED)):
        return True
    if (line := cause(error)) is None:
        return True
    if starts or ends:
        with suppress(OSError):
            log_files.write(_file(os.getppid()), json.dumps(line))
    if ends or start_log.chosen_by_the_user():
        return True
    log_files.append(record)
    if starts:
        raise SystemExit(1)
    return False


def _taken() -> str | None:
    """What a process that this one started has left."""
    file = _file(os.getpid())
    try:
        if file.stat().st_mtime < psutil.Process().create_time():  # an earlier process's
            return None
        line: str = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    file.unlink(missing_ok=True)
    return line


def _file(parent: int) -> Path:
    return log_files.folder() / f"cause-{parent}.json"


def end_commands_with_one_line(served: Mapping[str, Sequence[str]]) -> None:
    """Has a `vllm` command print the cause alone, last, and exit with status 1.

    Args:
        served: choices of options that are served here, of those that vLLM has.
    """
    print_causes()
    from vllm.entrypoints.launchers import launcher
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _SERVED.update(served)
    replace(launcher, "create_server_socket", _naming_the_port)
    replace(launcher, "create_server_unix_socket", _naming_the_path)
    replace(FlexibleArgumentParser, "error", _refuse)


def print_causes() -> None:
    """Has this process end with the cause alone, where it is known."""
    sys.excepthook = _tell_the_cause


def _tell_the_cause(
    kind: type[BaseException], error: BaseException, place: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(_INTERRUPTED, file=sys.stderr)
        return
    if (line := cause(error)) is None:
        sys.__excepthook__(kind, error, place)
        return
    log_files.append_error(error)
    tell(line)


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
    """Who listens on a port, where the system tells: macOS does not tell of other users."""
    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f" by {psutil.Process(found.pid).name()} (process {found.pid})"
    return ""


def tell(line: str) -> None:
    """Prints why a command ends; its first line has named the log."""
    print(ERROR_PREFIX + line, file=sys.stderr)


def _refuse(refuse: Callable[..., NoReturn], self: Any, message: str) -> NoReturn:
    """An argument that vLLM does not take: without all of its usage, and with a remedy."""
    command = refused_arguments.of_command(self, next(iter(sys.argv[1:]), None))
    tell(refused_arguments.told(command, message, _SERVED))
    raise SystemExit(1)
