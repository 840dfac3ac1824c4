# SPDX-License-Identifier: Apache-2.0
"""Plain versions of what the cache does, for tests."""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

FINGERPRINT = "0123456789abcdef"
FACTS = {"model": "toy", "weights": "ab" * 32, "kv_cache_dtype": "auto"}


def room(root: Path) -> int:
    """Bytes of all files under a root, each rounded up to 4096, by a plain walk."""
    sizes = []
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return sum((size + 4095) // 4096 * 4096 for size in sizes)


def files(root: Path, pattern: str = "*.kv") -> list[Path]:
    """Sorted. Folders may go meanwhile: `os.walk` leaves them out, `rglob` raises (Python 3.11)."""
    found = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sorted(path for path in found if path.match(pattern))


def key(number: int) -> bytes:
    """36 bytes, as vLLM's keys of offloaded blocks."""
    return number.to_bytes(4, "little") * 8 + bytes(4)


def block(number: int, size: int = 4000) -> memoryview:
    """Bytes that follow from a number."""
    return memoryview(np.random.default_rng(number).bytes(size))


def blank(page: memoryview) -> memoryview:
    """Writable memory of the same size."""
    return memoryview(bytearray(page.nbytes))


def wait_until(condition) -> None:
    """Waits for threads and other processes; only a broken one takes the whole time."""
    deadline = time.monotonic() + 60
    for pause in itertools.chain([0.001, 0.01], itertools.repeat(0.05)):
        if condition():
            return
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)


def blocks(cache, fingerprint: str = FINGERPRINT, namespace: str = "shared"):
    """A folder of a cache, when its manifest is written: a thread does it."""
    folder = cache.blocks(fingerprint, FACTS, namespace)
    wait_until(lambda: fingerprint in cache.manifests())
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file or folder another user's: root can, and others become another themselves."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
