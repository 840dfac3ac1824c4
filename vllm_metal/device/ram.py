# SPDX-License-Identifier: Apache-2.0
"""Estimates how much of this machine's memory a process can get."""

from __future__ import annotations

import sys

import psutil

from vllm_metal.device import sysctl

# On Linux psutil's `available` is the answer: MemAvailable. On macOS psutil adds free and inactive
# pages. But macOS leaves few pages free and compresses what programs do not use, so a Mac with a
# browser open has little of either and still has room. Its kernel counts more (xnu 11417, the names
# of `osfmk/vm` in brackets; each is a `sysctl`):
#
# - vm.page_free_count [vm_page_free_count]: free pages. `vm_stat` and psutil add the speculative
#   ones (files read ahead); this does not.
# - vm.page_pageable_external_count [vm_page_pageable_external_count]: pages of files, including
#   active, inactive and speculative ones (`vm_page_speculate`), so these are not added again.
# - vm.page_purgeable_count [vm_page_purgeable_count]: pages that programs can do without, not
#   wired. They are anonymous, so they overlap with no page of a file.
# - kern.memorystatus_level [AVAILABLE_NON_COMPRESSED_MEMORY, `vm_pressure_response`]: free,
#   speculative, active and inactive pages in percent of RAM: all except wired and compressed ones.
#
# macOS gives away the pages of the first three without loss. They are part of the fourth; the rest
# of it is what programs work with. macOS compresses that rest when it needs room, to a half by the
# algorithm's own figures (WKdm: Wilson, Kaplan and Smaragdakis, "The Case for Compressed Caching in
# Virtual Memory Systems", USENIX 1999), and only then swaps. So a process can get half of the rest
# without swapping.
SYSCTLS = (
    "vm.page_free_count",
    "vm.page_pageable_external_count",
    "vm.page_purgeable_count",
    "hw.pagesize",
    "kern.memorystatus_level",
    "hw.memsize",
)
#: Share of a page that compression frees.
COMPRESSION_SAVING = 1 / 2


def available(own: int) -> int:
    """Returns the bytes that this process can get beyond what it holds.

    `own`: bytes that MLX holds. They are in use whether macOS counts them as wired or as
    compressible, so they do not count as available.
    """
    known = psutil.virtual_memory().available
    given = _available_on_macos(own) if sys.platform == "darwin" else None
    # psutil counts inactive pages in full, as macOS compresses or swaps them: it may find more.
    return known if given is None else max(known, given)


def _available_on_macos(own: int) -> int | None:
    values = [number for name in SYSCTLS if (number := sysctl.read(name)) is not None]
    if len(values) < len(SYSCTLS):  # this kernel does not report all of them
        return None
    free, files, purgeable, page, level, ram = values
    pageable = ram * level // 100
    without_loss = min((free + files + purgeable) * page, pageable)
    in_use = max(pageable - without_loss - own, 0)
    return without_loss + int(in_use * COMPRESSION_SAVING)
