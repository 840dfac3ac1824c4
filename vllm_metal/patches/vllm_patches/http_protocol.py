# SPDX-License-Identifier: Apache-2.0
"""Limits what a connection may send before the server processes it.

With vLLM, uvicorn parses HTTP by httptools. Its class for that applies neither vLLM's limits on
headers (--h11-max-incomplete-event-size, --h11-max-header-count) nor a time limit on headers, or on
a client that reads its answer. httptools joins the pieces of a header in quadratic time: 64 MB,
without an API key, stopped a server for 9 seconds.
"""

# Remove when uvicorn's class for httptools respects vLLM's limits. Read against vLLM 0.33.

from __future__ import annotations

import asyncio
import resource
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    from uvicorn import Config


#: An extension of a request's scope; its "call" ends the connection at once.
HANG_UP = "vllm-metal.hang-up"
#: Seconds for a request's headers, as in nginx (client_header_timeout).
HEADER_TIMEOUT_S = 60.0
#: Seconds that a client may go on sending a body after its answer: enough to read the answer.
BODY_GRACE_S = 5.0
#: Seconds that a client may read nothing of a pending answer, as in nginx (send_timeout).
SEND_TIMEOUT_S = 60.0
#: Idle connections at a time, if half the file descriptors allow as many. The longest idle one is
#: closed for a new one.
MAX_IDLE = 1024
_SLICE = 1 << 14  # bytes of headers per call of the parser; the limit is checked in between


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with limits."""

    #: This process's connections without a request in progress, oldest first.
    _idle: ClassVar[dict[LimitedHttp, None]] = {}

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        """Reads the limits from uvicorn's configuration, where vLLM stores its options."""
        super().__init__(config, *args, **options)
        self._max_bytes = config.h11_max_incomplete_event_size or 1 << 16  # h11's own default
        self._max_headers: int | None = getattr(config, "h11_max_header_count", None)
        self._in_head, self._head_bytes = True, 0
        self._has_arrived = True  # whether the last request has arrived
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timeout(HEADER_TIMEOUT_S)
        self._become_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timeout(None)
        self._idle.pop(self, None)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_for_stall()

    def data_received(self, data: bytes) -> None:
        while self._in_head and data and not self.transport.is_closing():
            piece, data = data[:_SLICE], data[_SLICE:]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._in_head and self._head_bytes > self._max_bytes:
                self._refuse(431, f"The headers are longer than {self._max_bytes} bytes.")
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: {"call": self.transport.abort}}
        self._in_head, self._has_arrived = True, False
        self._set_timeout(HEADER_TIMEOUT_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if self._max_headers is not None and len(self.headers) > self._max_headers:
            self._refuse(431, f"There are more than {self._max_headers} headers.")

    def on_headers_complete(self) -> None:
        self._set_timeout(None)
        self._in_head, self._head_bytes = False, 0
        self._idle.pop(self, None)
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._has_arrived = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._become_idle()  # otherwise the next request has already arrived
        if not self._has_arrived:
            self._set_timeout(BODY_GRACE_S)
        if self.transport.get_write_buffer_size():
            self._watch_for_stall()

    def _become_idle(self) -> None:
        # Beyond the limit, a new connection replaces the longest idle one.
        self._idle[self] = None
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = descriptors == resource.RLIM_INFINITY
        if len(self._idle) > (MAX_IDLE if unlimited else min(MAX_IDLE, descriptors // 2)):
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def _set_timeout(self, seconds: float | None) -> None:
        """Closes the connection unless called again in time; None clears the timeout."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._on_timeout)

    def _watch_for_stall(self) -> None:
        # A client that reads nothing between two looks is disconnected.
        if self._stall_timer is None:
            left = self.transport.get_write_buffer_size()
            self._stall_timer = self.loop.call_later(SEND_TIMEOUT_S, self._check_stall, left)

    def _check_stall(self, before: int) -> None:
        self._stall_timer = None
        left = self.transport.get_write_buffer_size()
        if left and left == before:
            self.transport.abort()  # `close` would wait for the client
        elif left:
            self._watch_for_stall()

    def _on_timeout(self) -> None:
        if self._in_head and not self._has_arrived:
            self._refuse(408, "The headers took too long.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(message)
        self.transport.write(STATUS_LINE[status] + head + length + message.encode())
        self.transport.close()


def limit_connections() -> None:
    """Makes uvicorn use `LimitedHttp` instead of its own class for httptools."""
    from uvicorn.config import HTTP_PROTOCOLS

    if find_spec("httptools") is not None:
        HTTP_PROTOCOLS["auto"] = HTTP_PROTOCOLS["httptools"] = f"{__name__}:{LimitedHttp.__name__}"
