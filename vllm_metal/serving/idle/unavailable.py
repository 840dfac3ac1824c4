# SPDX-License-Identifier: Apache-2.0
"""Answers 503 to a request whose engine could not wake up, a stream's, too."""

from __future__ import annotations

from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.serving.idle.failure import EXCHANGE, MESSAGE, Exchange
from vllm_metal.serving.refusal import Refusal


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
