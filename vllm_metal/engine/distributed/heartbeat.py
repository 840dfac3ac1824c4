# SPDX-License-Identifier: Apache-2.0
"""Exchanges heartbeats between the ranks of an engine; if one falls silent, all ranks exit."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from vllm.logger import init_logger

logger = init_logger(__name__)

# Rank 0 has a TCP connection to every other rank, on which both ends send a byte every two seconds.
# A rank whose process ends closes its connection, which is noticed at once; a hanging machine or a
# cut link is silent. vLLM's executor notices if a worker on its machine ends, and fails the engine.
INTERVAL_S = 2.0  # between two beats
SILENCE_S = 8.0  # after which a rank counts as dead
_TOKEN_BYTES = 16
#: Limit of unidentified connections. Ranks identify at once, so the oldest is a stranger's.
_MAX_WAITING = 64
_GOODBYE = b"x"  # sent by a rank that ends normally
_BEAT = b"."


def end_process(reason: str) -> None:
    """Ends this worker at once, even if other threads are blocked."""
    logger.error("Shutting down this rank: %s", reason)
    os._exit(1)


def end_engine() -> None:
    """Kills the engine process that started this worker."""
    # vLLM's executor would wait minutes for a rank of another machine, even a dead one, and clients
    # would wait for the engine.
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and parent.name.startswith("EngineCore"):
        os.kill(parent.pid, signal.SIGKILL)


@dataclass
class Heartbeat:
    """Watches other ranks in its own thread."""

    peers: Mapping[int, socket.socket]  # open connections by rank
    lost: Callable[[str], object] = end_process  # called once in the thread, with the reason
    #: Processes of ranks on this machine. A silent one is killed: vLLM's executor reports an error
    #: only once it ends.
    pids: Mapping[int, int] = field(default_factory=dict)
    leave: Callable[[], object] = end_engine  # called before `lost` if that rank is remote
    interval_s: float = INTERVAL_S
    silence_s: float = SILENCE_S
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="Heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Notifies the other ranks that this one ends normally, and closes the connections."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=self.interval_s)
        for peer in self.peers.values():
            with suppress(OSError):
                peer.send(_GOODBYE)
            peer.close()

    def _run(self) -> None:
        lost = self._watch()
        if lost is None or self._closing.is_set():
            return
        rank, reason = lost
        if rank not in self.pids:
            self.leave()
        self.lost(reason)

    def _watch(self) -> tuple[int, str] | None:
        """Returns the lost rank and the reason; None if this rank ends normally."""
        heard = dict.fromkeys(self.peers, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for rank, peer in self.peers.items():
                peer.setblocking(False)
                selector.register(peer, selectors.EVENT_READ, rank)
            due = time.monotonic()
            while not self._closing.is_set():
                now = time.monotonic()
                if now >= due:
                    due = now + self.interval_s
                    if (lost := self._beat()) is not None:
                        return lost
                for key, _ in selector.select(max(min(due - now, 0.2), 0)):
                    if (reason := self.hear(key.data, heard)) is not None:
                        return key.data, reason
                for rank, at in heard.items():
                    # Compare with `now` from before the reads: this thread may get no CPU for
                    # long, and beats that arrived meanwhile are still unread.
                    if now - at > self.silence_s:
                        self._end_silence(rank)
                        return rank, f"rank {rank} has been silent for {self.silence_s:g} s"
        return None

    def _end_silence(self, rank: int) -> None:
        if rank in self.pids:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)

    def _beat(self) -> tuple[int, str] | None:
        for rank, peer in self.peers.items():
            try:
                peer.send(_BEAT)
            except BlockingIOError:
                continue  # its buffer is full, so it will be silent too
            except OSError as error:
                return rank, f"rank {rank} is gone: {error}"
        return None

    def hear(self, rank: int, heard: dict[int, float]) -> str | None:
        """Reads a rank's messages, records the time in `heard`, and returns why it is lost."""
        try:
            received = self.peers[rank].recv(4096)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"rank {rank} is gone: {error}"
        if _GOODBYE in received:  # usually all ranks end together, this one shortly
            self._closing.wait(self.interval_s)
            return f"rank {rank} has ended"
        if not received:
            return f"the process of rank {rank} has exited"
        heard[rank] = time.monotonic()
        return None


def join(
    rank: int, size: int, host: str, share: Callable[[object], list[object]], timeout_s: float
) -> Heartbeat:
    """Opens the heartbeat connections between rank 0 and each other rank.

    host: address of rank 0's machine for the other ranks. share: gathers each rank's value by
    rank; every rank calls it once.

    Raises OSError: the connections were not made within timeout_s.
    """
    if rank:
        address = share(None)[0]
        assert isinstance(address, tuple)
        port, token = address
        peer = socket.create_connection((host, port), timeout_s)
        peer.sendall(token + rank.to_bytes(4))
        return Heartbeat({0: peer})
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.create_server((host, 0)) as server:
        share((server.getsockname()[1], token))
        return Heartbeat(_accept_ranks(server, token, size, time.monotonic() + timeout_s))


def _accept_ranks(
    server: socket.socket, token: bytes, size: int, deadline: float
) -> dict[int, socket.socket]:
    """Accepts the connection of each rank; other connections cannot block it.

    Raises TimeoutError: not all ranks came in time.
    """
    peers: dict[int, socket.socket] = {}
    waiting: dict[socket.socket, bytes] = {}  # bytes received from each, oldest first
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while len(peers) < size - 1:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready or time.monotonic() > deadline:
                    raise TimeoutError("not all ranks have connected in time: read their logs")
                for key, _ in ready:
                    if key.fileobj is server:
                        _accept(server, selector, waiting)
                    elif (peer := cast(socket.socket, key.fileobj)) in waiting:
                        _read_greeting(peer, selector, waiting, peers, token, size)
        finally:
            for peer in waiting:
                peer.close()
    return peers


def _accept(
    server: socket.socket, selector: selectors.BaseSelector, waiting: dict[socket.socket, bytes]
) -> None:
    try:
        peer, _ = server.accept()
    except OSError:
        return  # the client has gone
    peer.setblocking(False)
    if len(waiting) >= _MAX_WAITING:
        oldest = next(iter(waiting))
        selector.unregister(oldest)
        del waiting[oldest]
        oldest.close()
    waiting[peer] = b""
    selector.register(peer, selectors.EVENT_READ)


def _read_greeting(
    peer: socket.socket,
    selector: selectors.BaseSelector,
    waiting: dict[socket.socket, bytes],
    peers: dict[int, socket.socket],
    token: bytes,
    size: int,
) -> None:
    """Reads a peer's greeting; once it is complete, accepts or closes the connection."""
    try:
        received = peer.recv(_TOKEN_BYTES + 4 - len(waiting[peer]))
    except OSError:
        received = b""
    waiting[peer] += received
    greeting = waiting[peer]
    if received and len(greeting) < _TOKEN_BYTES + 4:
        return
    selector.unregister(peer)
    del waiting[peer]
    rank = int.from_bytes(greeting[_TOKEN_BYTES:])
    known = secrets.compare_digest(greeting[:_TOKEN_BYTES], token)
    if known and 0 < rank < size and rank not in peers:
        peers[rank] = peer
    else:
        peer.close()
