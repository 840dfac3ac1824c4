# SPDX-License-Identifier: Apache-2.0
"""PageServer serves pages to peers, with a thread per connection."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from vllm.logger import init_logger

from vllm_metal.kv_transfer.peer import handshake
from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.limits import (
    MAX_CONNECTIONS,
    MAX_MESSAGE_BYTES,
    MAX_UNAUTHENTICATED,
    TIMEOUTS,
    Timeouts,
)
from vllm_metal.kv_transfer.peer.messages import (
    Ask,
    Busy,
    Done,
    Fetch,
    Found,
    NoPage,
    ProtocolError,
    Release,
    Renew,
    Row,
    Waiting,
    decode,
)
from vllm_metal.kv_transfer.peer.served_pages import ServedPages
from vllm_metal.kv_transfer.peer.wire import Link, shut_down
from vllm_metal.kv_transfer.shared_pool import SharedPool
from vllm_metal.settings.address import Address, is_loopback_ip

logger = init_logger(__name__)

#: Seconds until the next accept after one failed, for example for lack of file descriptors.
_ACCEPT_PAUSE_S = 0.2


class PageServer:
    """Serves pages on a port. Errors of a peer only end that peer's connection."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        export_cache: ExportCache,
        terms: Callable[[], Terms],
        timeouts: Timeouts = TIMEOUTS,
        max_connections: int = MAX_CONNECTIONS,
        pool: SharedPool | None = None,
    ) -> None:
        """
        Args:
            address: address to listen on; port 0 lets the system choose one.
            secret: shared by all peers; b"" for none, which requires a loopback address.
            terms: returns the current terms, from any thread. They only change after the export
                cache was cleared.
            max_connections: limit of authenticated connections; others get `Busy`.
            pool: its pages are copied to the export cache on request; None: it is not shared.

        Raises:
            ValueError: the address is not loopback, and there is no secret.
            OSError: the address cannot be listened on.
        """
        self._secret = secret
        self.pages = ServedPages(export_cache, pool, timeouts)
        self._terms = terms
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: dict[socket.socket, threading.Thread] = {}  # by connection
        #: The unauthenticated ones of these, with their IP addresses, oldest first.
        self._unauthenticated: dict[socket.socket, str] = {}
        self._sessions: Counter[int] = Counter()  # connections by session
        self._warned: set[str] = set()  # warnings, each logged once
        self._listener = _listen(address, secret)
        self.port: int = self._listener.getsockname()[1]
        self._woken, self._wake = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="kv-peer-accept", daemon=True)
        self._acceptor.start()

    @property
    def num_connections(self) -> int:
        """Number of connections, authenticated or not."""
        return len(self._threads)

    @property
    def num_sessions(self) -> int:
        """Number of engines with a connection to this server."""
        return len(self._sessions)

    def close(self) -> None:
        """Ends all connections, and waits for their threads."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.send(b"\0")
        self._acceptor.join()
        with self._lock:
            threads = dict(self._threads)
            for sock in threads:
                shut_down(sock)
        for thread in threads.values():
            thread.join()
        for sock in (self._listener, self._woken, self._wake):
            sock.close()

    # -- connections

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                selector.select()
                if self._closed.is_set():
                    return
                try:
                    sock, sockaddr = self._listener.accept()
                except (BlockingIOError, ConnectionError):
                    continue  # the client has already left
                except OSError as error:
                    self._warn(f"A connection could not be accepted: {error}")
                    self._closed.wait(_ACCEPT_PAUSE_S)
                    continue
                self._begin(sock, str(sockaddr[0]))

    def _begin(self, sock: socket.socket, ip: str) -> None:
        """Starts a connection's thread, or rejects the connection as busy."""
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="kv-peer-serve", daemon=True
        )
        try:
            with self._lock:
                if len(self._threads) - len(self._unauthenticated) < self._max_connections:
                    self._make_room()
                    thread.start()
                    self._threads[sock], self._unauthenticated[sock] = thread, ip
                    return
            link = Link(sock, self._timeouts.no_progress)
            link.send_bytes(handshake.PREAMBLE)  # does not block, as the buffer is empty
            link.send(Busy())
        except (OSError, RuntimeError) as error:
            self._warn(f"A connection could not be served: {error}")
        sock.close()

    def _make_room(self) -> None:
        """Ends the oldest unauthenticated connection of the busiest address, if there are many."""
        # So silent strangers shut nobody out, as peers authenticate at once.
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            ((busiest, _),) = Counter(self._unauthenticated.values()).most_common(1)
            oldest = next(sock for sock, ip in self._unauthenticated.items() if ip == busiest)
            del self._unauthenticated[oldest]
            shut_down(oldest)  # its thread closes it

    def _serve(self, sock: socket.socket) -> None:
        session = None
        try:
            terms = self._terms()
            session = handshake.greet(Link(sock, self._timeouts.authenticate), self._secret, terms)
            with self._lock:
                self._unauthenticated.pop(sock, None)
                self._sessions[session] += 1
            link = Link(sock, self._timeouts.no_progress)
            while not self._closed.is_set():
                link.wait_for_message()
                self._answer(link, session, terms)
        except handshake.WrongSecret:
            self._warn("Rejected an engine that does not know the 'secret'")
        except (OSError, ProtocolError, handshake.Refused):
            pass  # expected: the client goes on without this engine, or connects again
        except Exception:
            logger.exception("The connection of a peer failed")
        finally:
            self._end(sock, session)

    def _end(self, sock: socket.socket, session: int | None) -> None:
        with self._lock:
            del self._threads[sock]
            self._unauthenticated.pop(sock, None)
            sock.close()  # under the lock, so `close` never uses a descriptor that was reassigned
            if session is None:
                return
            self._sessions[session] -= 1
            is_last = not self._sessions[session]
            if is_last:
                del self._sessions[session]
                self.pages.release(session, None)

    def _warn(self, text: str) -> None:
        """Logs a warning once, so that a hostile peer cannot fill the log."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        logger.warning("%s", text)

    # -- requests

    def _answer(self, link: Link, session: int, terms: Terms) -> None:
        request = decode(link.receive(MAX_MESSAGE_BYTES), Ask, Fetch, Renew, Release)
        if isinstance(request, Ask):
            link.send(self.found(link, session, terms, request))
        elif isinstance(request, Fetch):
            self.send_pages(link, session, terms, request.keys)
        elif isinstance(request, Renew):
            self.pages.renew(session)
            link.send(Done())
        elif isinstance(request, Release):
            self.pages.release(session, request.keys)
            link.send(Done())

    def found(self, link: Link, session: int, terms: Terms, ask: Ask) -> Found:
        """Returns which of the requested pages are available, and leases them."""
        seconds = min(ask.wait_ms / 1000, self._timeouts.wait)
        there = self.pages.find(session, ask.keys, seconds, partial(self._send_waiting, link))
        self._check(terms)
        return Found([key in there for key in ask.keys])

    def _send_waiting(self, link: Link) -> bool:
        """Tells a waiting peer that this engine is alive; False: the server ends."""
        if self._closed.is_set():
            return False
        link.send(Waiting())
        return True

    def send_pages(self, link: Link, session: int, terms: Terms, keys: list[bytes]) -> None:
        """Sends pages one by one, so that a connection holds at most one evicted page."""
        export_cache = self.pages.export_cache
        with self.pages.export_pages(session, keys, partial(self._send_waiting, link)) as give:
            if not self.pages.has_all(keys):
                self._check(terms)
                link.send(NoPage())
                return
            for key in keys:
                page = give(key)
                self._check(terms)  # after taking the page: pages of new weights have new terms
                if page is None:
                    link.send(NoPage())
                    return
                link.send(Row(page.data.nbytes, page.checksum), raw=page.data)
                export_cache.count_sent(page.data.nbytes)

    def _check(self, terms: Terms) -> None:
        if self._terms().identity != terms.identity:
            raise handshake.Refused("the pages no longer match the terms of the handshake")


def _listen(address: Address, secret: bytes) -> socket.socket:
    named = f"'listen': {address}"
    try:
        family, sockaddr = address.resolve()[0]
    except OSError as error:
        raise OSError(f"{named} is not an address of this machine ({error})") from error
    if not secret and not is_loopback_ip(str(sockaddr[0])):
        raise ValueError(
            f"{named} is open to other machines, and K/V pages reveal prompts: set "
            "'secret' to a file with the same secret on both machines, or listen on "
            "127.0.0.1"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(sockaddr)
        sock.listen()
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {named} ({error.strerror}): choose another port"
        ) from error
    return sock
