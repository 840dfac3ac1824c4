# SPDX-License-Identifier: Apache-2.0
"""A loopback proxy that records requests and can cut an answer midway."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass(frozen=True)
class Exchange:
    """A request and its answer.

    Attributes:
        method: HTTP method.
        path: path and query.
        body: the request's JSON; None: it had none.
        status: status of the answer.
        answer: the text that the client received.
        cut: whether the connection was cut.
    """

    method: str
    path: str
    body: Any
    status: int
    answer: str
    cut: bool


@dataclass
class Proxy:
    """A running proxy. `url` is its address, `upstream` the server's.

    Set `cut` to hang up once, in the middle of the next stream that answers a request for whose
    body `cut` returns true.
    """

    url: str
    upstream: str
    cut: Callable[[Any], bool] | None = None
    _seen: list[Exchange] = field(default_factory=list)
    _under_way: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def cuts(self, body: Any) -> bool:
        """Returns whether to cut the stream that answers `body`; true only once."""
        with self._changed:
            chosen = self.cut is not None and self.cut(body)
            if chosen:
                self.cut = None
            return chosen

    def exchanges(self) -> list[Exchange]:
        """Recorded exchanges in order of completion; a client may leave before the last byte."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, timeout=60)
            return list(self._seen)

    @contextmanager
    def keeping(self) -> Iterator[list[Exchange]]:
        """Records an exchange in the list."""
        with self._changed:
            self._under_way += 1
        kept: list[Exchange] = []
        try:
            yield kept
        finally:
            with self._changed:
                self._seen += kept
                self._under_way -= 1
                self._changed.notify_all()


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """Runs a proxy in front of the server at `upstream` until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.proxy = Proxy(f"http://127.0.0.1:{server.server_port}", upstream)  # type: ignore
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.proxy  # type: ignore
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """Serves a connection until either side ends it; a client's reset counts as its end."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, *_: object) -> None:
        """Discards log messages."""

    def _pass_on(self) -> None:
        proxy: Proxy = self.server.proxy  # type: ignore
        with proxy.keeping() as kept:
            kept.append(self._exchange(proxy))

    do_GET = do_POST = do_HEAD = do_DELETE = _pass_on

    def _exchange(self, proxy: Proxy) -> Exchange:
        data = self._body()
        body = _json(data)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        headers["Accept-Encoding"] = "identity"
        upstream = http.client.HTTPConnection(urlsplit(proxy.upstream).netloc, timeout=600)
        try:
            upstream.request(self.command, self.path, data, headers)
            reply = upstream.getresponse()
            streamed = "event-stream" in reply.headers.get("Content-Type", "")
            answer, cut = self._answer(reply, streamed and proxy.cuts(body))
        finally:
            upstream.close()
        return Exchange(self.command, self.path, body, reply.status, answer.decode(), cut)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, reply: http.client.HTTPResponse, cut: bool) -> tuple[bytes, bool]:
        """Forwards the answer's chunks, or only the first; returns whether the rest is missing."""
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        passed = b""
        while part := reply.read1(65536):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.flush()
            passed += part
            if cut and passed.count(b"data:") > 3:
                self.close_connection = True
                return passed, True
        self.wfile.write(b"0\r\n\r\n")
        return passed, False


def _json(data: bytes) -> Any:
    return json.loads(data) if data else None
