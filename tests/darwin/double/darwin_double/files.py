# SPDX-License-Identifier: Apache-2.0
"""Hides files that macOS lacks."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from darwin_double import modules

#: Linux's processes, devices and shared memory.
ABSENT = ("/proc", "/sys", "/dev/shm")
#: Packages that correctly read them, because they detected Linux.
EXEMPT = ("psutil", *modules.LINUX_WHEELS)
_OF_OS = ("access", "listdir", "lstat", "open", "readlink", "scandir", "stat", "statvfs")


def install() -> None:
    for name in _OF_OS:
        real = getattr(os, name)
        guarded = _guard(real, missing=False if name == "access" else None)
        for names in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in names:
                names.add(guarded)
        setattr(os, name, guarded)
    builtins.open = io.open = _guard(io.open)
    modules.after_import("elftools.elf.elffile", _read_no_elf)


def is_absent(path: object) -> bool:
    """Returns whether a Mac lacks `path`."""
    if isinstance(path, int) or sys.platform != "darwin":
        return False
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        return False
    return any(text == root or text.startswith(root + "/") for root in ABSENT)


def _guard(real: Callable[..., Any], missing: object = None) -> Callable[..., Any]:
    """Wraps `real` to raise (or return `missing`, if given) for what a Mac lacks."""

    @functools.wraps(real)
    def guarded(*args: Any, **options: Any) -> Any:
        path = args[0] if args else options.get("path", options.get("file", "."))
        if is_absent(path) and not _exempt():
            if missing is not None:
                return missing
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(*args, **options)

    return guarded


def _exempt() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in EXEMPT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _read_no_elf(module: ModuleType) -> None:
    def refuse(self: object, stream: object, *args: object, **options: object) -> None:
        raise module.ELFError("Magic number does not match")  # as for a Mach-O file

    module.ELFFile.__init__ = refuse
