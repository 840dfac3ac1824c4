# SPDX-License-Identifier: Apache-2.0
"""Which engines of a root are alive: each keeps a file locked, which the system unlocks at its end.

Unlike process ids, locks are never taken for another process's, and are seen across containers.
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
    """Says that an engine lives, until it is closed or its process ends.

    Take it and look for the living with the ledger locked.

    Raises:
        OSError: its file cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = root / layout.ENGINES / self.name
        layout.make_folder(root, self._path.parent)
        self._descriptor = layout.create_file(self._path, os.O_RDWR | os.O_EXCL)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_known(self) -> bool:
        """Whether others still see it: nobody removed its file."""
        return os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        """Takes it back."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def living(root: Path) -> set[str]:
    """Names of the engines that live; removes what the others left in `engines`.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = root / layout.ENGINES
    if not folder.is_dir():
        return set()
    names = filter(_NAME.fullmatch, os.listdir(folder))
    return {name for name in names if _lives(folder / name)}


def _lives(path: Path) -> bool:
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
