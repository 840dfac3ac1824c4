# SPDX-License-Identifier: Apache-2.0
"""Returns 503 for requests whose sleeping engine cannot get its memory back (CannotWake)."""

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
    """State of one HTTP request."""

    failed: bool = False  # whether the engine could not wake up for it


#: State of the HTTP request that the current task serves.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("idle_exchange", default=None)


class CannotWake(GracefulHTTPError):
    """A request fails because its engine cannot wake up; the next request tries again."""

    def __init__(self) -> None:
        super().__init__(MESSAGE, HTTPStatus.SERVICE_UNAVAILABLE)
        # vLLM may handle the exception inside a stream, so the middleware learns of it this way.
        if (exchange := EXCHANGE.get()) is not None:
            exchange.failed = True


class Unavailable:
    """Middleware that delays a response's start until its first part, so that 503 can replace it.

    vLLM starts a stream, with status 200, before it calls the engine.
    """

    def __init__(self, app: ASGIApp) -> None:
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
                # Imported here, as `LLM` imports this module and does not need starlette.
                from vllm_metal.serving.refusal import Refusal

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
