# SPDX-License-Identifier: Apache-2.0
"""Wraps the application of vLLM's server in applications of ours."""

# Remove when a platform may name wrappers of a server's application. Read against vLLM 0.33.

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.patches.vllm_patches.replacing import replace

_LOG = logging.getLogger("uvicorn.error")  # uvicorn's own logger of application errors
_WRAPS: list[Callable[[Any, Any], Any]] = []  # for each server that starts, innermost first


def around_servers(wrap: Callable[[Any, Any], Any]) -> None:
    """Makes each server run `wrap(application, its state)`; call it where uvicorn is loaded.

    Later wrappers surround earlier ones. Adding a function a second time changes nothing.
    """
    from vllm.entrypoints.launchers.api_server import entry

    if wrap not in _WRAPS:
        _WRAPS.append(wrap)
    replace(entry, "serve_http", _serving)


async def _serving(serve_http: Callable[..., Any], app: Any, *args: Any, **options: Any) -> Any:
    # vLLM has already built its middlewares, so `add_middleware` would come too late.
    stack = _until_answered(app.middleware_stack or app.build_middleware_stack())
    for wrap in _WRAPS:
        stack = wrap(stack, app.state)
    app.middleware_stack = stack
    return await serve_http(app, *args, **options)


def _until_answered(app: ASGIApp) -> ASGIApp:
    # Starlette answers an exception with 500 and raises it again for the server to log. uvicorn
    # then closes the connection without notice, and the client's next request on it is lost.

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def sending(message: Message) -> None:
            nonlocal complete
            await send(message)
            is_body = message["type"] == "http.response.body"
            complete |= is_body and not message.get("more_body", False)

        try:
            await app(scope, receive, sending)
        except Exception:
            if not complete:
                raise
            _LOG.exception("Exception in ASGI application\n")

    return answered
