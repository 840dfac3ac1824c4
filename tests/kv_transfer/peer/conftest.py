# SPDX-License-Identifier: Apache-2.0
"""Servers, peers and proxies that end with their test and leave no threads."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kv_transfer.peer.engines import CALM, SECRET, Proxy, make_terms

from vllm_metal.kv_transfer.peer import wire
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.settings.address import Address

TESTS = Path(__file__).parents[2]


class Clock:
    """A clock in seconds, set by the test."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class WireClock:
    """The clock of all connections, with which a test skips waiting time."""

    def __init__(self):
        self._skipped = 0.0
        self._event = None

    def __call__(self):
        if self._event is not None and self._event.is_set():
            self.skip()
        return time.monotonic() + self._skipped

    def skip(self, seconds=1000.0):
        self._skipped += seconds

    @contextlib.contextmanager
    def hurrying_after(self, event):
        """Once the event is set, any connection that reads the clock without progress times out."""
        self._event = event
        try:
            yield
        finally:
            self._event = None


@pytest.fixture
def wire_clock(monkeypatch):
    clock = WireClock()
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture(autouse=True)
def no_such_host(monkeypatch):
    """Makes the name resolution of an unknown host fail without a network."""
    getaddrinfo = socket.getaddrinfo

    def found(host, *arguments, **options):
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return getaddrinfo(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)


def decoder_terms():
    return make_terms("decode-1")


class Log(logging.Handler):
    """Records this package's log lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, self.format(record)))

    def warnings(self):
        return [text for level, text in self.lines if level != "INFO"]


@pytest.fixture(autouse=True)
def log():
    logger, handler = logging.getLogger("vllm_metal.kv_transfer"), Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    for _, text in handler.lines:
        assert SECRET.decode() not in text and "Traceback" not in text, text


@pytest.fixture
def ends():
    """Closes the added objects at the end, and checks that no thread is left."""
    opened = []
    yield opened
    for each in reversed(opened):
        each.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("kv-peer")]
    assert left == []


@pytest.fixture
def export_cache(clock):
    """A send cache whose leases only expire when a test advances the clock."""
    return ExportCache(1 << 24, clock)


@pytest.fixture
def make_server(ends, export_cache):
    def make(
        secret=SECRET, terms=make_terms, port=0, export_cache=export_cache, timeouts=CALM, **others
    ):
        address = Address("127.0.0.1", port)
        server = PageServer(address, secret, export_cache, terms, timeouts, **others)
        ends.append(server)
        return server

    return make


@pytest.fixture
def make_peer(ends, clock):
    def make(port, secret=SECRET, terms=decoder_terms, difference=str, timeouts=CALM):
        address = Address("127.0.0.1", port)
        peer = Peer(address, secret, terms, difference, clock, timeouts)
        ends.append(peer)
        return peer

    return make


@pytest.fixture
def make_proxy(ends):
    def make(port):
        proxy = Proxy(port)
        ends.append(proxy)
        return proxy

    return make


@pytest.fixture
def start_engine():
    """Starts another process: see engines.py."""
    started = []

    def start(*arguments):
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS.parent / "interpreter")])
        child = subprocess.Popen(
            [sys.executable, "-m", "kv_transfer.peer.engines", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()
