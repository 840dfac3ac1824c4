# SPDX-License-Identifier: Apache-2.0
"""The chat page's web server: serves files, streams answers, renders Markdown, reads metrics."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.cli.chat import answer, energy, markdown, metrics
from vllm_metal.cli.chat.upstream import Upstream, UpstreamError

#: Host names that browsers may use. Any other name that resolves here is an attack (DNS rebinding).
HOSTS = ("127.0.0.1", "localhost")
STATIC = Path(__file__).with_name("static")
#: No external resources and no inline scripts, so that no answer can load or run anything.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def app(upstream: Upstream, token: str) -> Starlette:
    """Creates the application that serves the page and forwards requests to `upstream`.

    `token` is in the query of the page's address. Requests without it are rejected, because other
    users of the machine can reach the port, too.
    """
    page = _Page(upstream)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await upstream.close()

    return Starlette(
        routes=[
            Route("/api/model", page.model),
            Route("/api/metrics", page.metrics),
            Route("/api/answer", page.answer, methods=["POST"]),
            Route("/api/markdown", page.markdown, methods=["POST"]),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
            Middleware(_Headers),
            Middleware(_Token, token=token),
        ],
        lifespan=lifespan,
    )


class _Page:
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._joules = energy.meter()

    async def model(self, request: Request) -> Response:
        try:
            model = await self._upstream.model()
        except UpstreamError as error:
            return _error(str(error), 502)
        properties = ("label", "millions", "max_tokens")
        return JSONResponse(asdict(model) | {name: getattr(model, name) for name in properties})

    async def metrics(self, request: Request) -> Response:
        try:
            found = metrics.read(await self._upstream.metrics())
        except UpstreamError as error:
            return _error(str(error), 502)
        return JSONResponse(asdict(found) | {"joules": self._joules()})

    async def markdown(self, request: Request) -> Response:
        """Renders earlier answers, which the browser stores, as HTML blocks."""
        return await _handle_json(request, _render_blocks)

    async def answer(self, request: Request) -> Response:
        """Streams an answer's events, a line of JSON each."""
        return await _handle_json(request, self._stream)

    async def _stream(self, asked: Any) -> Response:
        model = await self._upstream.model()
        events = answer.events(self._upstream, answer.body(model, asked), model.context)
        lines = (json.dumps(event) + "\n" async for event in events)
        return StreamingResponse(lines, media_type="application/x-ndjson")


async def _render_blocks(asked: Any) -> Response:
    texts: Sequence[Any] = asked.get("texts", ())
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("texts must be a list of strings")
    return JSONResponse([markdown.blocks(text) for text in texts])


async def _handle_json(request: Request, act: Callable[[Any], Awaitable[Response]]) -> Response:
    # A page of another origin cannot send this type without a CORS preflight, which fails.
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return _error("the body must be application/json", 415)
    try:
        asked = await request.json()
        if not isinstance(asked, dict):
            raise ValueError("the body must be a JSON object")
        return await act(asked)
    except UnicodeError:
        return _error("a string contains half of a surrogate pair", 400)
    except RecursionError:
        return _error("the body is nested too deeply", 400)
    except ValueError as error:
        return _error(str(error), 400)
    except UpstreamError as error:
        return _error(str(error), 502)


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


class _Token:
    """Rejects requests without the token in the query, or in the cookie that this sets."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        name = f"vllm_metal_chat_{request.url.port}"  # cookies are shared by all ports of a host
        if request.url.path == "/" and self._is_valid(request.query_params.get("token")):
            redirect: Response = RedirectResponse("/", 303)
            redirect.set_cookie(name, self._token, httponly=True, samesite="lax")
            await redirect(scope, receive, send)
        elif self._is_valid(request.cookies.get(name)):
            await self._app(scope, receive, send)
        else:
            message = "Open the address that vllm-metal chat has printed."
            await _error(message, 401)(scope, receive, send)

    def _is_valid(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


class _Headers:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [
                    (name.lower().encode(), value.encode()) for name, value in _HEADERS.items()
                ]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
