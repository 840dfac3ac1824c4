# SPDX-License-Identifier: Apache-2.0
"""One TCP connection with framed messages, raw rows, and bounded waits.

A frame is a length (4 bytes, little-endian) and a message. Memory grows with received bytes, not
with the claimed length.
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
#: Bytes received at a time of a frame; bounds the memory that a claimed length costs.
_FRAME_PIECE_BYTES = 64 << 10
#: Bytes received at a time of a row, so that its checksum reads them from the CPU's cache.
ROW_PIECE_BYTES = 512 << 10
#: Longest that a system call blocks before its caller checks deadlines and `wanted`.
_SLICE_S = 0.25
#: TCP keepalive: seconds of silence before the first probe, between probes, and their number. A
#: machine that went to sleep is noticed in two minutes.
_KEEPALIVE = {"idle": 60, "interval": 20, "count": 3}


class Unwanted(Exception):
    """The data being received is no longer wanted."""


class PeerDown(Exception):
    """The server cannot be used now; the text says why."""


class Link:
    """A connected socket for one thread at a time; other threads may `shut_down` the socket."""

    def __init__(self, sock: socket.socket, no_progress_s: float) -> None:
        """The caller closes `sock`; waits end after `no_progress_s` without progress."""
        self.sock = sock
        self._patience = no_progress_s
        self.num_received = 0  # bytes over its lifetime
        sock.settimeout(None)
        _configure(sock, min(_SLICE_S, no_progress_s / 4))

    def send(self, message: Message, raw: memoryview | None = None) -> None:
        """Sends a message, then raw bytes; OSError, TimeoutError if the peer does not read them."""
        body = encode(message)
        self.send_bytes(_LENGTH.pack(len(body)) + body, raw)

    def send_bytes(self, head: bytes, raw: memoryview | None = None) -> None:
        """Sends bytes without a frame; raises as `send` does."""
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
            if rest:  # complete sends are never late
                rest[0] = rest[0][left:]
                progress.note(sent)

    def receive(self, limit: int, wanted: Callable[[], bool] | None = None) -> bytearray:
        """Receives the next message, of up to `limit` bytes, within `no_progress_s` seconds.

        Raises:
            ProtocolError: it is longer.
            OSError: the connection broke, or ended (ConnectionError).
            TimeoutError: it did not come in time.
            Unwanted: `wanted` returned False; it is called as by `receive_row`.
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
        """Receives bytes until a `time.monotonic` deadline; raises as `receive` does."""
        if deadline is None:
            deadline = time.monotonic() + self._patience
        body = bytearray()
        while len(body) < length:  # allocates memory as bytes arrive
            piece = bytearray(min(_FRAME_PIECE_BYTES, length - len(body)))
            body += memoryview(piece)[: self._receive_some(memoryview(piece))]
            if len(body) < length:
                if time.monotonic() > deadline:
                    raise TimeoutError("a message did not arrive in time")
                if wanted is not None and not wanted():
                    raise Unwanted
        return body

    def receive_row(
        self,
        row: memoryview,
        wanted: Callable[[], bool],
        received: Callable[[memoryview], object],
    ) -> None:
        """Fills a row with the next bytes.

        Args:
            wanted: returns whether to go on; called at least every quarter of a second.
            received: called with each received piece, in order.

        Raises:
            Unwanted: `wanted` returned False. The connection is unusable then.
            OSError, TimeoutError: as for `receive`.
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
        """Receives all bytes that fit, or those that came within a time slice."""
        try:
            got = self.sock.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            try:  # macOS keeps received bytes back until all have come
                got = self.sock.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        self.num_received += got
        return got

    def wait_for_message(self) -> None:
        """Waits without limit until a message comes or the connection ends."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll()

    def is_quiet(self) -> bool:
        """Returns whether an idle connection is open, and has received nothing."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it ended, or the other side sent something unasked

    def peer_ip(self) -> str:
        return str(self.sock.getpeername()[0])


class _Progress:
    """Raises TimeoutError when too few bytes have moved for too long."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._moved = 0
        self._deadline = time.monotonic() + patience

    def note(self, moved: int) -> None:
        self._moved += moved
        if self._moved >= LEAST_PROGRESS_BYTES:
            self._moved = 0
            self._deadline = time.monotonic() + self._patience
        elif time.monotonic() > self._deadline:
            raise TimeoutError("the peer stopped responding")


def shut_down(sock: socket.socket) -> None:
    """Ends a connection, and wakes a thread that waits for it."""
    with contextlib.suppress(OSError):  # it may have ended already
        sock.shutdown(socket.SHUT_RDWR)


def _configure(sock: socket.socket, slice_s: float) -> None:
    """Makes a socket block for a time slice at most, send at once, and notice lost machines."""
    # The kernel ends the wait, instead of Python's timeout, which would poll the socket twice per
    # call, and could never receive a whole piece in one.
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
