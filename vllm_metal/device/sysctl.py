# SPDX-License-Identifier: Apache-2.0
"""Reads numbers and texts from the macOS kernel by name."""

from __future__ import annotations

import ctypes


def read(name: str) -> int | None:
    """Returns the kernel's number of that name (``vm.page_free_count``), or None. macOS only."""
    # Numbers have 32 or 64 bits, and the ones read here are never negative. Apple silicon is
    # little-endian, so a 64-bit zero holds either after the call.
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else value.value


def read_text(name: str) -> str | None:
    """Returns the kernel's text of that name (``hw.model``), or None. macOS only."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else value.value.decode(errors="replace")
