# SPDX-License-Identifier: Apache-2.0
"""CannotWake: an engine that slept could not take its memory again; such a request gets 503."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from vllm.exceptions import GracefulHTTPError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MESSAGE = (
    "The server returned its memory while it was idle and could not get it back: another program "
    "may use it now. Try again later. Operators: close other programs; the log has the reason."
)


@dataclass
class Exchange:
    """What became of one request of a server."""

    failed: bool = False


#: Of the request that this task answers.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("idle_exchange", default=None)


class CannotWake(GracefulHTTPError):
    """Raised for a request. The engine sleeps on, and may be able to wake up for the next."""

    def __init__(self) -> None:
        """Notes it in the exchange of this task, where there is one."""
        super().__init__(MESSAGE, HTTPStatus.SERVICE_UNAVAILABLE)
        if (exchange := EXCHANGE.get()) is not None:
            exchange.failed = True


class Unavailable:
    """Holds the start of an answer until its first part is there, as it may have to be another.

    vLLM begins a stream before it asks the engine, with status 200.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Takes the application that answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange()
        held: Message | None = None
        replaced = False

        async def send_on(message: Message) -> None:
            nonlocal held, replaced
            if replaced:
                return
            if message["type"] == "http.response.start":
                held = message
                return
            start, held = held, None
            if start is not None and exchange.failed:
                replaced = True
                from vllm_metal.serving.refusal import Refusal  # `LLM` has no use for starlette

                answer = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, MESSAGE).response()
                await answer(scope, receive, send)
                return
            if start is not None:
                await send(start)
            await send(message)

        token = EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, send_on)
        finally:
            EXCHANGE.reset(token)
