# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of two engines; as a program, one of them: `engines.py serve|hold ...`.

`serve SEED COUNT SIZE` prints the port that serves its pages; `hold PORT SEED COUNT SIZE` requests
pages from a server, prints the number of leases, and holds them. Both run until they are
killed.
"""

import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
import types
from dataclasses import replace

if __name__ == "__main__":
    # Importing vLLM takes seconds; only its logger is used here.
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm.logger"] = types.ModuleType("vllm.logger")
    sys.modules["vllm.logger"].init_logger = logging.getLogger

from vllm_metal.kv_transfer.peer import handshake
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.limits import Timeouts
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.kv_transfer.peer.wire import Link
from vllm_metal.settings.address import Address

SECRET = b"a secret of the tests"
#: Test timeout, long enough for a busy machine.
CALM = Timeouts(connect=20.0, no_progress=60.0, authenticate=60.0, wait=2.0, waiting_interval=0.05)
#: Timeout where a connection is only expected to end.
QUICK = replace(CALM, no_progress=0.5, authenticate=0.5)


def make_terms(engine_id="prefill-1", fingerprint="f00d", page_bytes=(4096,), **facts):
    return Terms(engine_id, fingerprint, {"model": "toy", **facts}, page_bytes)


def make_pages(count, size, seed=0):
    """Makes pages by key, of 36 bytes as in vLLM."""
    rng = random.Random(seed)
    return {rng.randbytes(36): rng.randbytes(size) for _ in range(count)}


def blank(pages):
    """Returns memory for pages, and a function that reads it."""
    return [bytearray(len(page)) for page in pages]


def views(buffers):
    return [memoryview(buffer) for buffer in buffers]


def fill(export_cache, pages):
    for key, page in pages.items():
        assert export_cache.put(key, memoryview(page))


def pull(peer, pages, wanted=lambda: True):
    """Returns whether all pages arrived unchanged."""
    into = blank(pages.values())
    done = peer.fetch(list(pages), views(into), wanted)
    if done:
        assert into == list(pages.values())
    return done


def wait_until(condition, seconds=60):
    """Waits for a condition; the timeout only affects failing tests."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def connect(port, no_progress_s=20.0):
    """Connects to a server, without a handshake."""
    return Link(socket.create_connection(("127.0.0.1", port)), no_progress_s)


def introduced(port, session=b"i" * 16, no_progress_s=20.0):
    """Connects to a server, and completes the handshake."""
    link = connect(port, no_progress_s)
    handshake.introduce(link, SECRET, session, make_terms())
    return link


def is_over(link):
    """Waits for the other side to close a connection, ignoring its data."""
    try:
        while link.sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False  # a time slice is over
    except ConnectionError:
        pass
    return True


class Proxy:
    """A proxy that corrupts the server's data once a test has armed it."""

    def __init__(self, port):
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._fault = None
        self._left = 0  # bytes until the fault
        self._sockets = []
        self._closed = threading.Event()
        self.happened = threading.Event()
        self.num_connections = 0
        self._threads = [self._start(self._accept)]

    def arm(self, after, fault):
        """After `after` more bytes from the server: "flip" a bit, "stall", or "cut"."""
        with self._lock:
            self.happened.clear()
            self._left, self._fault = after, fault

    def close(self):
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # no more connections
        self._cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work, *args):
        thread = threading.Thread(target=work, args=args)
        thread.start()
        return thread

    def _accept(self):
        while not self._closed.is_set():
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.num_connections += 1
            try:
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:  # the server is gone
                near.close()
                continue
            with self._lock:
                self._sockets += [near, far]
            self._threads.append(self._start(self._pump, near, far, False))
            self._threads.append(self._start(self._pump, far, near, True))

    def _pump(self, source, target, is_servers):
        try:
            while data := source.recv(1 << 16):
                target.sendall(self._spoiled(data, target) if is_servers else data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spoiled(self, data, target):
        with self._lock:
            fault, at = self._fault, self._left
            self._left -= len(data)
            if fault is None or at >= len(data):
                return data
            self._fault = None
        self.happened.set()
        if fault == "flip":
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        target.sendall(data[:at])
        if fault == "stall":
            self._closed.wait()
        self._cut()
        raise OSError("cut")

    def _cut(self):
        with self._lock:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def main():
    role, *numbers = sys.argv[1:]
    if role == "serve":
        seed, count, size = map(int, numbers)
        export_cache = ExportCache(count * size)
        fill(export_cache, make_pages(count, size, seed))
        terms = make_terms(f"process-{os.getpid()}")
        server = PageServer(Address("127.0.0.1", 0), SECRET, export_cache, lambda: terms)
        print(server.port, flush=True)
    else:
        port, seed, count, size = map(int, numbers)
        peer = Peer(
            Address("127.0.0.1", port), SECRET, lambda: make_terms("decode-1"), str, timeouts=CALM
        )
        print(len(peer.lookup(make_pages(count, size, seed))), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
