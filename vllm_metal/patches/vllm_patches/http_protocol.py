# SPDX-License-Identifier: Apache-2.0
"""Bounds what a connection to the server may send before anybody looks at it.

uvicorn parses HTTP by httptools where that is installed, as vLLM does. Its class for that knows
neither vLLM's limits on headers (--h11-max-incomplete-event-size, --h11-max-header-count) nor a
time that they may take, nor one that a client may take to read its answer. httptools joins the
pieces of a header in the square of its length: 64 MB, without an API key, stopped a server for 9
seconds.
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


#: An extension of a request's scope: under "call", what ends its connection at once.
HANG_UP = "vllm-metal.hang-up"
#: That the headers of a request may take, as nginx has it (client_header_timeout).
HEAD_S = 60.0
#: That a client may go on sending a body after its answer: enough to read the answer.
AFTER_ANSWER_S = 5.0
#: That a client may take nothing of an answer that waits for it, as nginx has it (send_timeout).
TAKE_S = 60.0
#: Connections that may wait for a request at one time, as far as descriptors allow half as many.
#: The one that has waited longest gives way.
MAX_IDLE = 1024
_SLICE = 1 << 14  # bytes of headers that the parser gets at a time


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with limits."""

    #: Those of this process of which no request is served, the oldest first.
    _idle: ClassVar[dict[LimitedHttp, None]] = {}

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        """Takes the limits from the configuration, where vLLM puts those of its options."""
        super().__init__(config, *args, **options)
        self._max_bytes = config.h11_max_incomplete_event_size or 1 << 16  # h11's own default
        self._max_headers: int | None = getattr(config, "h11_max_header_count", None)
        self._in_head, self._head_bytes = True, 0
        self._whole = True  # whether the last request has arrived
        self._timer: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._within(HEAD_S)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        self._idle.pop(self, None)
        if self._taking is not None:
            self._taking.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_at_the_rest()

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
        self._in_head, self._whole = True, False
        self._within(HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if self._max_headers is not None and len(self.headers) > self._max_headers:
            self._refuse(431, f"There are more than {self._max_headers} headers.")

    def on_headers_complete(self) -> None:
        self._within(None)
        self._in_head, self._head_bytes = False, 0
        self._idle.pop(self, None)
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._whole = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:
            self._wait()  # else the next request has come already
        if not self._whole:
            self._within(AFTER_ANSWER_S)
        if self.transport.get_write_buffer_size():
            self._look_at_the_rest()

    def _wait(self) -> None:
        """Begins to wait for a request, in the place of who has waited longest if all are taken."""
        self._idle[self] = None
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = descriptors == resource.RLIM_INFINITY
        if len(self._idle) > (MAX_IDLE if unlimited else min(MAX_IDLE, descriptors // 2)):
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def _within(self, seconds: float | None) -> None:
        """Ends the connection unless this is called again in time; None: nothing is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _look_at_the_rest(self) -> None:
        """Begins to look, from time to time, whether the client takes what waits for it."""
        if self._taking is None:
            left = self.transport.get_write_buffer_size()
            self._taking = self.loop.call_later(TAKE_S, self._look_again, left)

    def _look_again(self, before: int) -> None:
        self._taking = None
        left = self.transport.get_write_buffer_size()
        if left and left == before:
            self.transport.abort()  # `close` would wait for the client
        elif left:
            self._look_at_the_rest()

    def _late(self) -> None:
        if self._in_head and not self._whole:
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
    """Has uvicorn take this class where it would take its own for httptools."""
    from uvicorn.config import HTTP_PROTOCOLS

    if find_spec("httptools") is not None:
        HTTP_PROTOCOLS["auto"] = HTTP_PROTOCOLS["httptools"] = f"{__name__}:{LimitedHttp.__name__}"
