# SPDX-License-Identifier: Apache-2.0
"""Imitates the system's names, and the start of processes."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager

import darwin_double

#: Kernel release of macOS 15.5.
KERNEL = "24.5.0"
#: `platform.mac_ver()[0]`: the release, unless the variable is set.
RELEASE = os.environ.get("DARWIN_DOUBLE_RELEASE", "15.5")
#: Packages that a forked child does not survive once they are loaded.
FORK_UNSAFE = ("torch", "mlx.core")

#: Functions of `os` that Python on a Mac lacks.
ABSENT = ("copy_file_range", "eventfd", "getrandom", "memfd_create", "pidfd_open", "posix_fadvise")
ABSENT += ("sched_getaffinity", "sched_setaffinity", "splice")

_real_uname = os.uname


def install() -> None:
    sysconfig.get_config_vars()  # read from a module that is named after sys.platform
    for name in ABSENT:
        if hasattr(os, name):
            delattr(os, name)
    os.uname = _uname
    platform.mac_ver = _mac_ver
    # Compiled into Python on a Mac only; urllib reads the system's proxies from it.
    proxies = types.ModuleType("_scproxy")
    proxies._get_proxies = dict  # type: ignore[attr-defined]
    proxies._get_proxy_settings = dict  # type: ignore[attr-defined]
    sys.modules["_scproxy"] = proxies
    _become("darwin")
    os.register_at_fork(after_in_child=_end_forked_child)
    import multiprocessing.context

    # as the module does on a Mac, if it was imported earlier
    spawn = multiprocessing.context._concrete_contexts["spawn"]
    multiprocessing.context._default_context._default_context = spawn


@contextmanager
def as_linux() -> Iterator[None]:
    """Shows the real platform to code in the block."""
    before = sys.platform
    _become("linux")
    try:
        yield
    finally:
        _become(before)


def _become(name: str) -> None:
    sys.platform = name
    platform._uname_cache = None  # type: ignore[attr-defined]
    platform._platform_cache.clear()  # type: ignore[attr-defined]


def _uname() -> os.uname_result:
    real = _real_uname()
    if sys.platform != "darwin":
        return real
    version = f"Darwin Kernel Version {KERNEL}: root:xnu-11417.121.6~2/RELEASE_ARM64_T6000"
    return os.uname_result(("Darwin", real.nodename, KERNEL, version, "arm64"))


def _mac_ver(
    release: str = "", versioninfo: tuple[str, str, str] = ("", "", ""), machine: str = ""
) -> tuple[str, tuple[str, str, str], str]:
    if sys.platform != "darwin":
        return release, versioninfo, machine
    return RELEASE, ("", "", ""), "arm64"


def _end_forked_child() -> None:
    if loaded := [name for name in FORK_UNSAFE if name in sys.modules]:
        darwin_double.crash(f"forked with {' and '.join(loaded)} loaded")
