# SPDX-License-Identifier: Apache-2.0
"""Compares the rate of pages pulled from another process with a plain socket's.

Both move the same bytes over the loopback into the same memory, with equally many connections.
Pulls also have an engine's messages and a checksum per page, computed when the source keeps the
page and again when the receiver gets it.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _peer_source
from _peer_source import LOOPBACK, REQUEST

from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.settings.address import Address

#: Pages of 16 tokens: SmolLM2-135M in float32 (46,080 bytes a token), and an 8B model with 16-bit
#: K/V of 8 heads (131,072).
PAGE_BYTES = (737_280, 2_097_152)
CONNECTIONS = (1, 2)  # an engine loads by two threads
_PAGES_OF_A_CALL = 4  # about 8 MiB, a piece of an engine's load


@dataclass(frozen=True)
class PullRates:
    """GB/s, medians; the ratio is the median of ratios taken in turn."""

    page_bytes: int
    connections: int
    pulled: float
    plain: float
    ratio: float  # pulled over plain


def measure_pulls(total_bytes: int, repeats: int) -> list[PullRates]:
    """Runs all measurements.

    Args:
        total_bytes: bytes per turn.
        repeats: number of turns.
    """
    return [
        rates
        for page_bytes in PAGE_BYTES
        for rates in _of_pages(page_bytes, max(8, total_bytes // page_bytes), repeats)
    ]


def _of_pages(page_bytes: int, num_pages: int, repeats: int) -> Iterator[PullRates]:
    memory = bytearray(page_bytes * num_pages)
    memory[:] = b"\1" * len(memory)  # touch it before the first turn
    whole = memoryview(memory)
    pages = [whole[n * page_bytes :][:page_bytes] for n in range(num_pages)]
    calls = [range(n, min(n + _PAGES_OF_A_CALL, num_pages)) for n in range(0, num_pages, 4)]
    with _source(page_bytes, num_pages) as (peer_port, plain_port):
        own = _peer_source.terms(page_bytes, "puller")
        peer = Peer(Address(LOOPBACK, peer_port), b"", lambda: own, lambda facts: "")
        keys = [_peer_source.key(number) for number in range(num_pages)]
        assert len(peer.lookup(keys)) == num_pages

        def pull(numbers: range) -> None:
            there = [keys[n] for n in numbers]
            assert peer.fetch(there, [pages[n] for n in numbers], lambda: True)

        for connections in CONNECTIONS:
            times: list[tuple[float, float]] = []
            with ExitStack() as stack, ThreadPoolExecutor(connections) as threads:
                sockets = [
                    stack.enter_context(socket.create_connection((LOOPBACK, plain_port)))
                    for _ in range(connections)
                ]
                for _ in range(repeats):
                    pulled = _seconds(partial(_all, threads, pull, calls))
                    plain = _seconds(partial(_plainly, threads, sockets, calls, pages))
                    times.append((pulled, plain))
            yield PullRates(
                page_bytes,
                connections,
                len(whole) / statistics.median(pulled for pulled, _ in times) / 1e9,
                len(whole) / statistics.median(plain for _, plain in times) / 1e9,
                statistics.median(plain / pulled for pulled, plain in times),
            )
        peer.close()


def _plainly(
    threads: ThreadPoolExecutor,
    sockets: Sequence[socket.socket],
    calls: Sequence[range],
    pages: Sequence[memoryview],
) -> None:
    """Receives the same bytes over plain sockets; the connections share the calls."""

    def receive(place: int) -> None:
        sock = sockets[place]
        for numbers in calls[place :: len(sockets)]:
            sock.sendall(REQUEST.pack(numbers.start, len(numbers)))
            for number in numbers:
                got = sock.recv_into(pages[number], 0, socket.MSG_WAITALL)
                assert got == len(pages[number])

    list(threads.map(receive, range(len(sockets))))


def _all(threads: ThreadPoolExecutor, pull: Callable[[range], None], calls: list[range]) -> None:
    list(threads.map(pull, calls))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _source(page_bytes: int, num_pages: int) -> Iterator[tuple[int, int]]:
    """Runs another process with these pages; yields its ports for pulls and for plain reads."""
    script = str(Path(_peer_source.__file__).resolve())
    process = subprocess.Popen(
        [sys.executable, script, str(page_bytes), str(num_pages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        pulls, plain = process.stdout.readline().split()
        yield int(pulls), int(plain)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
