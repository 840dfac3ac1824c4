# SPDX-License-Identifier: Apache-2.0
"""Proxy for disaggregated prefill with one decode server and any number of prefill servers.

A long prompt first goes to a prefill server (chosen by `helpers.py`), which generates one token and
returns the location of its K/V. Then it goes to the decode server with that location, and the
answer is streamed back. Prefill servers may come and go: if one fails, the prompt goes to the
next, and finally to the decode server alone. `GET /status` returns each server's counters.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from answered import POOL_TOKENS, Answered, prompt_tokens
from helpers import LONGEST_PREFILL_S, SHORTEST_TOKENS, Choice, Helper
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger("proxy")

#: Asks a server to prefill for another one, in vLLM's form.
PREFILL_ONLY: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
#: Settings of the answer, which a prefill server ignores.
OF_THE_ANSWER = ("stream_options", "min_tokens", "n")
CONNECT_S = 2.0  # as between the servers
PROBE_S = 2.0  # between probes of a prefill server, and the timeout of one
PATHS = ("/v1/completions", "/v1/chat/completions")
#: Prefill server statuses below this mean that the request is at fault, not the server.
_SERVER_ERRORS = 500


class Proxy:
    """A decode server and its prefill servers."""

    def __init__(self, choice: Choice, answered: Answered, decode: httpx.AsyncClient) -> None:
        self._choice = choice
        self._answered = answered
        self._decode = decode

    def app(self) -> Starlette:
        """Returns the app, which probes the prefill servers while it runs."""
        routes = [Route(path, self._serve, methods=["POST"]) for path in PATHS]
        routes += [Route("/health", self._health), Route("/status", self._status)]
        return Starlette(routes=routes, lifespan=self._lifespan)

    async def _serve(self, request: Request) -> Response:
        body = await request.json()
        kept = ("authorization", "x-request-id")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        prompt, whose = dict(body), headers.get("authorization", "")
        new = self._answered.new_tokens(prompt, whose)
        found = await self._prefill(request.url.path, body, headers, new)
        pace = self._choice.alone
        if found is not None:
            helper, body["kv_transfer_params"] = found
            pace = helper.fetch
        started = time.monotonic()

        def first_byte() -> None:
            self._answered.note(prompt, whose)
            if prompt.get("stream"):  # otherwise the first byte comes with the last token
                pace.note(new, time.monotonic() - started)

        upstream = self._decode.build_request("POST", request.url.path, json=body, headers=headers)
        try:
            answer = await self._decode.send(upstream, stream=True)
        except httpx.HTTPError as error:
            problem = f"the decode server does not answer: {type(error).__name__}"
            return JSONResponse({"error": {"message": problem, "code": 502}}, 502)
        media = answer.headers.get("content-type")
        return StreamingResponse(relay(answer, first_byte), answer.status_code, media_type=media)

    async def _prefill(
        self, path: str, body: dict, headers: dict[str, str], new: int
    ) -> tuple[Helper, dict] | None:
        """Returns the prefill server that computed a prompt and its K/V location, or None."""
        asked = {name: value for name, value in body.items() if name not in OF_THE_ANSWER}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_ONLY}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        tokens = prompt_tokens(body)
        for helper in self._choice.order(tokens, new):
            try:
                reply = await helper.post(path, asked, headers, tokens)
                params = reply.get("kv_transfer_params")
                return None if params is None else (helper, params)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < _SERVER_ERRORS:
                    return None  # the decode server reports the request's error
                self._failed(helper, error)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                self._failed(helper, error)
        return None

    def _failed(self, helper: Helper, error: Exception) -> None:
        helper.failed()
        url, name = helper.client.base_url, type(error).__name__
        logger.warning("no prefill from %s (%s)", url, name)

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _status(self, request: Request) -> Response:
        alone = self._choice.alone.seconds(1000)
        helpers = [helper.as_json() for helper in self._choice.helpers]
        return JSONResponse({"helpers": helpers, "seconds_alone_1000": alone})

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.gather(*map(watch, self._choice.helpers))
        try:
            yield
        finally:
            watching.cancel()
            clients = [helper.client for helper in self._choice.helpers]
            for each in (*clients, self._decode):
                await each.aclose()


async def watch(helper: Helper, pause_s: float = PROBE_S) -> None:
    """Probes a prefill server periodically, since a hung machine never reports an error."""
    while True:
        try:
            reply = await helper.client.get("/health", timeout=PROBE_S)
            helper.seen(True)
            if not reply.is_success:  # shutting down, or its engine has died
                helper.rest()
        except httpx.HTTPError:
            helper.seen(False)
        await asyncio.sleep(pause_s)


async def relay(answer: httpx.Response, first_byte: Callable[[], None]) -> AsyncIterator[bytes]:
    """Forwards an answer as it arrives."""
    waiting = answer.is_success
    try:
        async for piece in answer.aiter_raw():
            if waiting:
                waiting = False
                first_byte()
            yield piece
    finally:  # also if the client disconnected: the decode server then aborts the request
        await answer.aclose()


def make_app(
    prefill: Sequence[httpx.AsyncClient],
    decode: httpx.AsyncClient,
    shortest: int = SHORTEST_TOKENS,
    pool_tokens: int = POOL_TOKENS,
) -> Starlette:
    """Makes the proxy; servers are clients with base URLs.

    Args:
        prefill: prefill servers.
        decode: the decode server.
        shortest: minimum new tokens of a prompt to use a prefill server.
        pool_tokens: KV pool size of the decode server.
    """
    choice = Choice([Helper(each) for each in prefill], shortest)
    return Proxy(choice, Answered(pool_tokens), decode).app()


def client(url: str, longest_s: float | None) -> httpx.AsyncClient:
    """Returns a client with a timeout of `longest_s` seconds; None: no limit."""
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(longest_s, connect=CONNECT_S)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--prefill", action="append", help="address of a prefill server; repeatable"
    )
    parser.add_argument(
        "--decode", default="http://127.0.0.1:8200", help="address of the decode server"
    )
    parser.add_argument(
        "--shortest",
        type=int,
        default=SHORTEST_TOKENS,
        help="prompts with fewer new tokens go to the decode server only (%(default)s)",
    )
    parser.add_argument(
        "--pool-tokens",
        type=int,
        default=POOL_TOKENS,
        help="tokens that the decode server's KV pool holds, from its log (%(default)s)",
    )
    args = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    urls = args.prefill or ["http://127.0.0.1:8100"]
    prefill = [client(url, LONGEST_PREFILL_S) for url in urls]
    app = make_app(prefill, client(args.decode, None), args.shortest, args.pool_tokens)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
