# SPDX-License-Identifier: Apache-2.0
"""A client's connections to one server: opened on demand, reused, one call at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.limits import Timeouts
from vllm_metal.kv_transfer.peer.wire import Link, PeerDown, shut_down
from vllm_metal.settings import local_network
from vllm_metal.settings.address import Address

T = TypeVar("T")


class Unavailable(Exception):
    """No connection is available: all are in use, backing off, or closed; the text says which."""


@dataclass(frozen=True, eq=False)
class Connection:
    """A link after its handshake."""

    link: Link
    own: Terms  # terms offered in the handshake


class Connections:
    """A bounded, thread-safe pool of connections."""

    def __init__(
        self,
        address: Address,
        introduce: Callable[[Link], Terms],
        is_current: Callable[[Terms], bool],
        may_connect: Callable[[], bool],
        timeouts: Timeouts,
        most: int,
    ) -> None:
        """
        Args:
            introduce: performs the handshake; returns the offered terms, or raises.
            is_current: returns whether this engine's terms are still those of the connection.
            may_connect: returns whether to open a new connection.
            most: limit of open connections.
        """
        self._address = address
        self._introduce = introduce
        self._is_current = is_current
        self._may_connect = may_connect
        self._timeouts = timeouts
        self._most = most
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._sockets: set[socket.socket] = set()  # including opening connections
        self._num_open = 0
        self._closed = False

    def call(self, work: Callable[[Link], T]) -> T:
        """Runs `work` on a connection.

        Raises:
            Unavailable: other calls use all connections, `may_connect` returned False, or `close`
                was called.
            PeerDown: the server could not be reached, or stopped answering.
            Anything else that `introduce` or `work` raises.
        """
        connection = self._take()
        good = False
        try:
            if connection is not None:
                before = connection.link.num_received
                try:
                    result = work(connection.link)
                except ConnectionError:
                    # Retry once if the idle connection broke, as after a restart of the server.
                    if self._closed or connection.link.num_received != before:
                        raise
                    self._close_socket(connection.link.sock)
                    connection = None
            if connection is None:
                if not self._may_connect():
                    raise Unavailable("backing off")
                connection = self._open()
                result = work(connection.link)
            good = True
            return result
        except TimeoutError as error:
            raise PeerDown(f"it stopped answering ({error})") from error
        finally:
            self._give_back(connection, good)

    def close(self) -> None:
        """Ends all connections, and wakes threads that wait for one."""
        with self._changed:
            self._closed = True
            for sock in self._sockets:
                shut_down(sock)
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            self._give_back(connection, good=False)

    def _take(self) -> Connection | None:
        """Takes an idle connection; None: the caller may open one, which is already counted."""
        deadline = time.monotonic() + self._timeouts.no_progress
        while True:
            with self._changed:
                while not self._closed and not self._idle and self._num_open >= self._most:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise Unavailable("all in use")
                if self._closed:
                    raise Unavailable("closed")
                if not self._idle:
                    self._num_open += 1
                    return None
                connection = self._idle.pop()
            if connection.link.is_quiet() and self._is_current(connection.own):
                return connection
            self._give_back(connection, good=False)

    def _give_back(self, connection: Connection | None, good: bool) -> None:
        """Returns a connection, or the right to open one."""
        with self._changed:
            good = good and not self._closed
            if connection is not None and good:
                self._idle.append(connection)
            else:
                self._num_open -= 1
            self._changed.notify()
        if connection is not None and not good:
            self._close_socket(connection.link.sock)

    def _open(self) -> Connection:
        try:
            link = self._connect()
        except OSError as error:
            raise PeerDown(_reason(error)) from error
        try:
            return Connection(link, self._introduce(link))
        except BaseException as error:
            self._close_socket(link.sock)
            if isinstance(error, OSError):
                raise PeerDown(_reason(error)) from error
            raise

    def _connect(self) -> Link:
        deadline = time.monotonic() + self._timeouts.connect
        failure: OSError | None = None
        for family, sockaddr in self._address.resolve():
            left = deadline - time.monotonic()
            if failure is not None and left <= 0:
                break
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                with self._changed:
                    if self._closed:
                        raise Unavailable("closed")
                    self._sockets.add(sock)
                sock.settimeout(max(left, 0.001))
                sock.connect(sockaddr)
                with self._changed:
                    if self._closed:  # during connect, when shutdown has no effect
                        raise Unavailable("closed")
                return Link(sock, self._timeouts.no_progress)
            except BaseException as error:
                self._close_socket(sock)
                if not isinstance(error, OSError):
                    raise
                failure = error
        assert failure is not None
        raise failure

    def _close_socket(self, sock: socket.socket) -> None:
        with self._changed:  # so that `close` never uses a descriptor that was reassigned
            self._sockets.discard(sock)
            sock.close()


def _reason(error: OSError) -> str:
    """Describes why connecting failed, and what the user may do about it."""
    return ". ".join(filter(None, (str(error.strerror or error), local_network.advice(error))))
