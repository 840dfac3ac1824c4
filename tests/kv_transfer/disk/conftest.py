# SPDX-License-Identifier: Apache-2.0
"""Shared disk caches."""

import logging

import pytest

from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore

#: 2026-03-02 12:00:00 UTC.
NOON = 1772452800.0


class Clock:
    """A clock in seconds since the epoch, set by the test."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def make_cache(root, clock):
    """Makes caches in one root, and closes them at the end."""
    made = []

    def make(max_bytes=10**7, daily=None, root=root):
        cache = DiskStore(root, Limits(max_bytes, daily), clock)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


class Log(logging.Handler):
    """Records this package's log, whether or not vLLM handles it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.fixture
def log():
    logger, handler = logging.getLogger("vllm_metal.kv_transfer"), Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
