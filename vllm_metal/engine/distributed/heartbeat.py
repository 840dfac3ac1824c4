# SPDX-License-Identifier: Apache-2.0
"""Heartbeats between the ranks of an engine: where one is silent, all of them end.

Rank 0 is joined to every other rank by a TCP connection, on which both ends send a byte every two
seconds. A rank whose process ends closes its connection, which is heard at once; one that hangs as
a machine, or whose link is cut, is silent. vLLM's executor sees that a worker of its machine ends,
and fails the engine.
"""

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

INTERVAL_S = 2.0  # between two beats
SILENCE_S = 8.0  # after which a rank counts as dead
_TOKEN_BYTES = 16
#: Connections that have not said who they are. Ranks do at once, so the oldest is a stranger's.
_MAX_WAITING = 64
_GOODBYE = b"x"  # of a rank that ends as it should
_BEAT = b"."


def end_process(reason: str) -> None:
    """Ends this worker at once, whatever its other threads wait for."""
    logger.error("Shutting down this rank: %s", reason)
    os._exit(1)


def end_engine() -> None:
    """Kills the process of the server's engine that this worker is of.

    vLLM's executor in it would wait minutes for what a rank of another machine answers, whether or
    not that is there, and clients for the engine.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and parent.name.startswith("EngineCore"):
        os.kill(parent.pid, signal.SIGKILL)


@dataclass
class Heartbeat:
    """Watches other ranks in a thread of its own.

    peers: open connections, by rank. lost: called once, with what happened, in the thread.
    pids: processes of ranks on this machine, by rank. One that is silent is killed: vLLM's executor
    waits for it to end before it says anything.
    leave: called before `lost` where a rank of another machine is lost.
    interval_s, silence_s: see INTERVAL_S, SILENCE_S.
    """

    peers: Mapping[int, socket.socket]
    lost: Callable[[str], object] = end_process
    pids: Mapping[int, int] = field(default_factory=dict)
    leave: Callable[[], object] = end_engine
    interval_s: float = INTERVAL_S
    silence_s: float = SILENCE_S
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to send and to listen."""
        self._thread = threading.Thread(target=self._run, name="Heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells the others that this rank ends as it should, and lets go of the connections."""
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
        """The rank that was lost, and how; None where this rank ends as it should."""
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
                    # What came until `now` was read behind it. This thread may get no processor
                    # for long: what has come meanwhile is not known yet.
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
                continue  # its buffer is full: it will have been silent, too
            except OSError as error:
                return rank, f"rank {rank} is gone: {error}"
        return None

    def hear(self, rank: int, heard: dict[int, float]) -> str | None:
        """Takes what a rank sent. Returns what was lost, if anything."""
        try:
            received = self.peers[rank].recv(4096)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"rank {rank} is gone: {error}"
        if _GOODBYE in received:  # as a rule all ranks end together: this one is about to
            self._closing.wait(self.interval_s)
            return f"rank {rank} has ended"
        if not received:
            return f"the process of rank {rank} has exited"
        heard[rank] = time.monotonic()
        return None


def join(
    rank: int, size: int, host: str, share: Callable[[object], list[object]], timeout_s: float
) -> Heartbeat:
    """Connects rank 0 with all others.

    Args:
        rank, size: of this process, and how many there are.
        host: an address of rank 0's machine that the others reach.
        share: gives what each rank gave, by rank; every rank calls it once.
        timeout_s: for connections to be made.

    Raises:
        OSError: they were not.
    """
    if rank:
        place = share(None)[0]
        assert isinstance(place, tuple)
        port, token = place
        peer = socket.create_connection((host, port), timeout_s)
        peer.sendall(token + rank.to_bytes(4))
        return Heartbeat({0: peer})
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.create_server((host, 0)) as server:
        share((server.getsockname()[1], token))
        return Heartbeat(_greeted(server, token, size, time.monotonic() + timeout_s))


def _greeted(
    server: socket.socket, token: bytes, size: int, deadline: float
) -> dict[int, socket.socket]:
    """Takes the connection of each rank, whatever strangers say or do not say meanwhile.

    Raises:
        TimeoutError: not all ranks came in time.
    """
    peers: dict[int, socket.socket] = {}
    waiting: dict[socket.socket, bytes] = {}  # what each has said so far, the oldest first
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while len(peers) < size - 1:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready or time.monotonic() > deadline:
                    raise TimeoutError("not all ranks have connected in time")
                for key, _ in ready:
                    if key.fileobj is server:
                        _take(server, selector, waiting)
                    elif (peer := cast(socket.socket, key.fileobj)) in waiting:
                        _listen_to(peer, selector, waiting, peers, token, size)
        finally:
            for peer in waiting:
                peer.close()
    return peers


def _take(
    server: socket.socket, selector: selectors.BaseSelector, waiting: dict[socket.socket, bytes]
) -> None:
    try:
        peer, _ = server.accept()
    except OSError:
        return  # who came has gone
    peer.setblocking(False)
    if len(waiting) >= _MAX_WAITING:
        oldest = next(iter(waiting))
        selector.unregister(oldest)
        del waiting[oldest]
        oldest.close()
    waiting[peer] = b""
    selector.register(peer, selectors.EVENT_READ)


def _listen_to(
    peer: socket.socket,
    selector: selectors.BaseSelector,
    waiting: dict[socket.socket, bytes],
    peers: dict[int, socket.socket],
    token: bytes,
    size: int,
) -> None:
    """Reads what a connection says, and takes or closes it when that is enough."""
    try:
        said = peer.recv(_TOKEN_BYTES + 4 - len(waiting[peer]))
    except OSError:
        said = b""
    waiting[peer] += said
    greeting = waiting[peer]
    if said and len(greeting) < _TOKEN_BYTES + 4:
        return
    selector.unregister(peer)
    del waiting[peer]
    rank = int.from_bytes(greeting[_TOKEN_BYTES:])
    known = secrets.compare_digest(greeting[:_TOKEN_BYTES], token)
    if known and 0 < rank < size and rank not in peers:
        peers[rank] = peer
    else:
        peer.close()
