# SPDX-License-Identifier: Apache-2.0
"""Log files of servers and failed starts: where they are, who can read them, when they expire."""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from contextlib import suppress
from pathlib import Path

from metal_kernels.cache import cache_dir

MAX_LOGS = 10  # number of most recent logs
_EARLIER = ".old"  # replaces .log in the name of a rotated log
_MOST_BYTES = 50_000_000  # of a log before it is rotated: some 500,000 requests


def folder() -> Path:
    """Returns the folder of all logs."""
    return cache_dir() / "logs"


def current() -> Path | None:
    """Returns the log file of this process; None if it has no handler of class `LogFile`."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, LogFile):
            return Path(handler.baseFilename)
    return None


class LogFile(logging.handlers.WatchedFileHandler):
    """A log that several processes write; only the process it is named after rotates it."""

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(self.baseFilename)
        if path.stem.endswith(f"-{os.getpid()}"):
            with suppress(OSError):
                if path.stat().st_size > _MOST_BYTES:
                    path.replace(path.with_suffix(_EARLIER))
                    _create(path)
        super().emit(record)


def begin(kind: str) -> Path:
    """Creates an empty log that only its owner can read, and deletes the oldest ones."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = sorted(folder().glob("*-*.log"), key=lambda path: path.stat().st_mtime)
    for log in [log for log in logs if not _is_in_use(log)][: -MAX_LOGS + 1 or None]:
        for suffix in (".log", ".json", _EARLIER):
            log.with_suffix(suffix).unlink(missing_ok=True)
    path = folder() / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    _create(path)
    return path


def _is_in_use(log: Path) -> bool:
    # The name ends with the process's id; signal 0 only checks that the process exists.
    try:
        os.kill(int(log.stem.rpartition("-")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # it exists, and belongs to another user
        pass
    return True


def write(path: Path, text: str) -> None:
    """Writes a file that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _create(path)
    path.write_text(text)


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))


def append(record: logging.LogRecord) -> Path | None:
    """Writes a record to the current log, or to a new one; returns the log, or None on failure."""
    with suppress(OSError):
        log = current() or begin("failed")
        with log.open("a") as file:
            file.write(logging.Formatter().format(record) + "\n")
        return log
    return None


def append_error(error: BaseException) -> Path | None:
    """Like `append`, for an error and its traceback."""
    exc_info = (type(error), error, error.__traceback__)
    return append(
        logging.LogRecord(__name__, logging.ERROR, "", 0, "Failed to start", (), exc_info)
    )
