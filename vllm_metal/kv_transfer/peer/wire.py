# SPDX-License-Identifier: Apache-2.0
"""One TCP connection: framed messages, raw rows, and an end to every wait.

A frame is its length (4 bytes, little-endian) and a message. Memory grows with what has arrived,
never with what a length claims.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

from vllm_metal.kv_transfer.peer.limits import LEAST_PROGRESS_BYTES
from vllm_metal.kv_transfer.peer.messages import Message, ProtocolError, encode

_LENGTH = struct.Struct("<I")
#: Bytes taken of a frame at a time; bounds what a claimed length costs.
_FRAME_PIECE_BYTES = 64 << 10
#: Bytes taken of a row at a time: read once more, for the checksum, while the CPU's cache has them.
ROW_PIECE_BYTES = 512 << 10
#: The longest that a system call waits before its caller looks at deadlines, and at who still wants
#: what it waits for.
_SLICE_S = 0.25
#: Seconds of silence before TCP asks whether the other side is there, between questions, and how
#: often it asks: a machine that went to sleep is noticed in two minutes.
_KEEPALIVE = {"idle": 60, "interval": 20, "count": 3}


class Unwanted(Exception):
    """Nobody wants any more what is being received."""


class PeerDown(Exception):
    """The server cannot be used now; says why."""


class Link:
    """A connected socket, used by one thread at a time; another may `shut_down` its socket."""

    def __init__(self, sock: socket.socket, no_progress_s: float) -> None:
        """
        Args:
            sock: connected; whoever made it closes it.
            no_progress_s: seconds without progress that end a wait.
        """
        self.sock = sock
        self._patience = no_progress_s
        self.num_received = 0  # bytes, ever
        sock.settimeout(None)
        _configure(sock, min(_SLICE_S, no_progress_s / 4))

    def send(self, message: Message, raw: memoryview | None = None) -> None:
        """Sends a message, then raw bytes.

        Raises:
            OSError: the connection broke.
            TimeoutError: the other side does not read.
        """
        body = encode(message)
        self.send_bytes(_LENGTH.pack(len(body)) + body, raw)

    def send_bytes(self, head: bytes, raw: memoryview | None = None) -> None:
        """Sends bytes as they are; raises as `send` does."""
        rest = [memoryview(head)] if raw is None else [memoryview(head), raw]
        progress = _Progress(self._patience)
        while rest:
            try:
                sent = self.sock.sendmsg(rest)
            except BlockingIOError:
                sent = 0
            left = sent
            while rest and left >= rest[0].nbytes:
                left -= rest.pop(0).nbytes
            if rest:  # what has gone out whole is not late
                rest[0] = rest[0][left:]
                progress.note(sent)

    def receive(self, limit: int, wanted: Callable[[], bool] | None = None) -> bytearray:
        """The next frame's message, which has `no_progress_s` seconds to arrive.

        Args:
            limit: bytes that a message may have.
            wanted: as of `receive_row`.

        Raises:
            ProtocolError: it is longer.
            OSError: the connection broke, or ended (ConnectionError).
            TimeoutError: it did not come in time.
        """
        deadline = time.monotonic() + self._patience
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size, deadline, wanted))
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes, over the limit of {limit}")
        return self.receive_bytes(length, deadline, wanted)

    def receive_bytes(
        self,
        length: int,
        deadline: float | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> bytearray:
        """So many bytes; raises as `receive` does.

        Args:
            length: how many; memory is taken as they arrive.
            deadline: of `time.monotonic`; None: `no_progress_s` seconds from now.
            wanted: as of `receive_row`.
        """
        if deadline is None:
            deadline = time.monotonic() + self._patience
        body = bytearray()
        while len(body) < length:
            piece = bytearray(min(_FRAME_PIECE_BYTES, length - len(body)))
            body += memoryview(piece)[: self._receive_some(memoryview(piece))]
            if len(body) < length:
                if time.monotonic() > deadline:
                    raise TimeoutError("a message did not come in time")
                if wanted is not None and not wanted():
                    raise Unwanted
        return body

    def receive_row(
        self,
        row: memoryview,
        wanted: Callable[[], bool],
        received: Callable[[memoryview], object],
    ) -> None:
        """Fills a row with the bytes that come next.

        Args:
            row: writable bytes.
            wanted: whether to go on; asked at least every quarter of a second.
            received: called with each piece that is there, in order.

        Raises:
            Unwanted: `wanted` said no. The connection is of no more use.
            OSError, TimeoutError: as `receive`.
        """
        progress = _Progress(self._patience)
        while row.nbytes:
            if not wanted():
                raise Unwanted
            got = self._receive_some(row[:ROW_PIECE_BYTES])
            if got:
                received(row[:got])
                row = row[got:]
            if row.nbytes:
                progress.note(got)

    def _receive_some(self, into: memoryview) -> int:
        """Bytes that came, all that fit unless a slice of time is over before."""
        try:
            got = self.sock.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            try:  # where the system keeps what has come until all has (macOS)
                got = self.sock.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        self.num_received += got
        return got

    def wait_for_message(self) -> None:
        """Waits until something comes, or the connection ends, however long that takes."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll()

    def is_quiet(self) -> bool:
        """Whether a connection that nobody uses is as it should be: open, and nothing has come."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # ended, or the other side says what nobody asked

    def peer_ip(self) -> str:
        """The other side's address, as a number."""
        return str(self.sock.getpeername()[0])


class _Progress:
    """Gives up when too little has moved for too long."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._moved = 0
        self._deadline = time.monotonic() + patience

    def note(self, moved: int) -> None:
        """So many bytes moved since the last call."""
        self._moved += moved
        if self._moved >= LEAST_PROGRESS_BYTES:
            self._moved = 0
            self._deadline = time.monotonic() + self._patience
        elif time.monotonic() > self._deadline:
            raise TimeoutError("the peer stopped responding")


def shut_down(sock: socket.socket) -> None:
    """Ends a connection that another thread may wait for, which wakes it."""
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


def _configure(sock: socket.socket, slice_s: float) -> None:
    """A socket that blocks for a slice of time at most, sends at once, and notices lost machines.

    The kernel ends the wait, not Python's own timeout: that would look at the socket twice for
    every call, and never receive a whole piece by one.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = int(slice_s)
    wait = struct.pack("@ll", seconds, int((slice_s - seconds) * 1e6))  # struct timeval
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        idle = socket.TCP_KEEPALIVE
    else:
        idle = socket.TCP_KEEPIDLE
    sock.setsockopt(socket.IPPROTO_TCP, idle, _KEEPALIVE["idle"])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE["interval"])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE["count"])
