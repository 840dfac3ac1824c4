# SPDX-License-Identifier: Apache-2.0
"""Spare buffers are freed under memory pressure, with rare checks."""

import logging

import mlx.core as mx
import pytest

from vllm_metal.engine.memory.pressure import (
    CRITICAL,
    LOG_EVERY,
    NORMAL,
    POLL_EVERY,
    WARNING,
    MemoryPressure,
)


class System:
    """A clock, and a level of memory pressure that counts queries."""

    def __init__(self):
        self.now, self.level, self.asked = 0.0, NORMAL, 0

    def read_level(self):
        self.asked += 1
        return self.level


@pytest.fixture
def system():
    return System()


@pytest.fixture
def pressure(system):
    return MemoryPressure(system.read_level, lambda: system.now)


@pytest.fixture
def log():
    """The module's log messages."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm_metal.engine.memory.pressure")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)  # whatever commands have set above it
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)


def spare_buffers():
    mx.clear_cache()
    mx.eval(mx.zeros(2**20))
    assert mx.get_cache_memory() > 0


def test_the_level_is_read_once_a_second_at_most(system, pressure):
    for _ in range(1000):
        pressure.poll()
        system.now += POLL_EVERY / 100
    assert 9 <= system.asked <= 11


def test_nothing_happens_while_there_is_memory(system, pressure, log):
    spare_buffers()
    before = mx.get_cache_memory()
    pressure.poll()
    assert mx.get_cache_memory() == before
    assert not log


@pytest.mark.parametrize(
    ("level", "word", "times"), [(WARNING, "low", 1), (CRITICAL, "critically low", LOG_EVERY)]
)
def test_spare_buffers_are_given_back_and_it_is_said_once_in_a_while(
    system, pressure, log, level, word, times
):
    """Once a minute where memory is low, each second where it is critically low."""
    system.level = level
    given_back = 0
    for _ in range(int(LOG_EVERY)):
        spare_buffers()
        pressure.poll()
        given_back += mx.get_cache_memory() == 0
        system.now += POLL_EVERY
    assert given_back == times
    assert len(log) == 1
    assert f"memory is {word}: freed 4 MiB of spare buffers" in log[0]
    pressure.poll()
    assert len(log) == 2


def test_a_level_that_becomes_critical_is_not_waited_for(system, pressure, log):
    system.level = WARNING
    pressure.poll()
    system.level, system.now = CRITICAL, POLL_EVERY
    spare_buffers()
    pressure.poll()
    assert mx.get_cache_memory() == 0


def test_elsewhere_than_on_macos_nobody_is_asked(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    spare_buffers()
    before = mx.get_cache_memory()
    MemoryPressure().poll()
    assert mx.get_cache_memory() == before
