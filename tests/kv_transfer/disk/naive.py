# SPDX-License-Identifier: Apache-2.0
"""Naive versions of the cache's functions."""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

FINGERPRINT = "0123456789abcdef"
FACTS = {"model": "toy", "weights": "ab" * 32, "kv_cache_dtype": "auto"}


def room(root: Path) -> int:
    """Returns the bytes of all files under a root, each rounded up to 4096."""
    sizes = []
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return sum((size + 4095) // 4096 * 4096 for size in sizes)


def files(root: Path, pattern: str = "*.kv") -> list[Path]:
    """Returns sorted files; ignores deleted folders, on which `rglob` raises (Python 3.11)."""
    found = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sorted(path for path in found if path.match(pattern))


def key(number: int) -> bytes:
    """Returns 36 bytes, like vLLM's keys of offloaded blocks."""
    return number.to_bytes(4, "little") * 8 + bytes(4)


def block(number: int, size: int = 4000) -> memoryview:
    """Returns bytes determined by a number."""
    return memoryview(np.random.default_rng(number).bytes(size))


def blank(page: memoryview) -> memoryview:
    """Returns writable memory of the same size."""
    return memoryview(bytearray(page.nbytes))


def wait_until(condition) -> None:
    """Waits for threads and other processes; only a broken one takes the whole timeout."""
    deadline = time.monotonic() + 60
    for pause in itertools.chain([0.001, 0.01], itertools.repeat(0.05)):
        if condition():
            return
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)


def blocks(cache, fingerprint: str = FINGERPRINT, namespace: str = "shared"):
    """Returns a cache's folder once a thread has written its manifest."""
    folder = cache.blocks(fingerprint, FACTS, namespace)
    wait_until(lambda: fingerprint in cache.manifests())
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the owner of a path, or pretends to when not root."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
