# SPDX-License-Identifier: Apache-2.0
"""Numbers that macOS's kernel tells by name."""

from __future__ import annotations

import ctypes


def read(name: str) -> int | None:
    """A number such as ``vm.page_free_count``; None: the kernel tells none of that name.

    macOS only. The kernel's numbers have 32 or 64 bits, none of those asked for a sign; a Mac with
    Apple silicon has the low ones first, so that a buffer of zeros holds either.
    """
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else value.value
