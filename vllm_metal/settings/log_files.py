# SPDX-License-Identifier: Apache-2.0
"""Logs of servers, and of starts that failed: where they lie, who can read them, when they go."""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from contextlib import suppress
from pathlib import Path

from metal_kernels.cache import cache_dir

KEPT = 10  # logs, the latest
_EARLIER = ".old"  # in place of .log: what was logged before it began anew
_MOST_BYTES = 50_000_000  # of a log, before it begins anew: some 500,000 requests


def folder() -> Path:
    """Where logs lie."""
    return cache_dir() / "logs"


def current() -> Path | None:
    """The file that this process logs to, if it is one of ours."""
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, LogFile):
            return Path(handler.baseFilename)
    return None


class LogFile(logging.handlers.WatchedFileHandler):
    """A log that several processes write; the one that it is named after begins it anew."""

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(self.baseFilename)
        if path.stem.endswith(f"-{os.getpid()}"):
            with suppress(OSError):
                if path.stat().st_size > _MOST_BYTES:
                    path.replace(path.with_suffix(_EARLIER))
                    _create(path)
        super().emit(record)


def begin(kind: str) -> Path:
    """Makes an empty log, which its user alone can read; the oldest ones go."""
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = sorted(folder().glob("*-*.log"), key=lambda path: path.stat().st_mtime)
    for log in [log for log in logs if not _is_written(log)][: -KEPT + 1 or None]:
        for suffix in (".log", ".json", _EARLIER):
            log.with_suffix(suffix).unlink(missing_ok=True)
    path = folder() / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    _create(path)
    return path


def _is_written(log: Path) -> bool:
    """Whether the process that a log is named after still runs."""
    try:
        os.kill(int(log.stem.rpartition("-")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def write(path: Path, text: str) -> None:
    """Writes a file that its user alone can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _create(path)
    path.write_text(text)


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))


def append(record: logging.LogRecord) -> Path | None:
    """Writes what is not to be seen on the terminal to the log, or to one that is made for it.

    Returns:
        The log; None where none can be written.
    """
    with suppress(OSError):
        log = current() or begin("failed")
        with log.open("a") as file:
            file.write(logging.Formatter().format(record) + "\n")
        return log
    return None


def append_error(error: BaseException) -> Path | None:
    """As `append`, of an error and where it comes from."""
    told = (type(error), error, error.__traceback__)
    return append(logging.LogRecord(__name__, logging.ERROR, "", 0, "Failed to start", (), told))
