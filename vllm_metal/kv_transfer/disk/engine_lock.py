# SPDX-License-Identifier: Apache-2.0
"""Detects which engines of a cache are alive: each locks a file, which the system unlocks at exit.

Unlike process ids, locks are never reused, and they work across containers.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

from vllm_metal.kv_transfer.disk import layout

_NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")


class EngineLock:
    """Marks an engine as alive until it is closed or its process ends.

    Create it and call `running_engines` with the ledger locked. Raises OSError if it cannot create
    its file.
    """

    def __init__(self, root: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = root / layout.ENGINES / self.name
        layout.make_folder(root, self._path.parent)
        self._descriptor = layout.create_file(self._path, os.O_RDWR | os.O_EXCL)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_known(self) -> bool:
        """Returns whether its file still exists, so that other engines see this one as alive."""
        return os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def running_engines(root: Path) -> set[str]:
    """Returns names of living engines, and removes files of dead ones; OSError if unreadable."""
    folder = root / layout.ENGINES
    if not folder.is_dir():
        return set()
    names = filter(_NAME.fullmatch, os.listdir(folder))
    return {name for name in names if _is_alive(folder / name)}


def _is_alive(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)
