# SPDX-License-Identifier: Apache-2.0
"""Stands before two servers: one computes prompts, the other answers from the first one's K/V.

A request goes to the prefill server first, which makes one token of it and says where its K/V are;
then, with what it said, to the decode server, whose answer is passed on as it comes. Where the
prefill server does not do its part, the decode server answers alone.
"""

import argparse
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger("proxy")

#: vLLM's form of asking a server to prefill for another one.
PREFILL_ONLY: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
#: Settings of an answer, which the prefill server does not make.
OF_THE_ANSWER = ("stream_options", "min_tokens")
CONNECT_S = 2.0  # as the servers wait for each other
LONGEST_PREFILL_S = 600.0  # a long prompt of a large model; then the decode server computes it
PATHS = ("/v1/completions", "/v1/chat/completions")


def make_app(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> Starlette:
    """The proxy of two servers, given as clients with their base addresses."""

    async def serve(request: Request) -> Response:
        body = await request.json()
        kept = ("authorization", "x-request-id")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        params = await where_kv_are(request.url.path, body, headers)
        if params is not None:
            body["kv_transfer_params"] = params
        upstream = decode.build_request("POST", request.url.path, json=body, headers=headers)
        try:
            answer = await decode.send(upstream, stream=True)
        except httpx.HTTPError as error:
            problem = f"the decode server does not answer: {type(error).__name__}"
            return JSONResponse({"error": {"message": problem, "code": 502}}, 502)
        media = answer.headers.get("content-type")
        return StreamingResponse(relay(answer), answer.status_code, media_type=media)

    async def where_kv_are(path: str, body: dict, headers: dict[str, str]) -> dict | None:
        """What the prefill server says of a prompt's K/V, once it has computed them."""
        asked = {name: value for name, value in body.items() if name not in OF_THE_ANSWER}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_ONLY}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        try:
            reply = await prefill.post(path, json=asked, headers=headers)
            reply.raise_for_status()
            return reply.json().get("kv_transfer_params")
        except (httpx.HTTPError, ValueError) as error:
            logger.warning("no prefill (%s): the decode server answers alone", type(error).__name__)
            return None

    async def relay(answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:  # also where the client has gone: the decode server ends the request
            await answer.aclose()

    async def health(request: Request) -> Response:
        return Response()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with prefill, decode:
            yield

    routes = [Route(path, serve, methods=["POST"]) for path in PATHS]
    return Starlette(routes=[*routes, Route("/health", health)], lifespan=lifespan)


def client(url: str, longest_s: float | None) -> httpx.AsyncClient:
    """A client of a server that may take so long to answer; None: as long as it takes."""
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(longest_s, connect=CONNECT_S)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", default="http://127.0.0.1:8100", help="address of a server")
    parser.add_argument("--decode", default="http://127.0.0.1:8200", help="address of a server")
    args = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    app = make_app(client(args.prefill, LONGEST_PREFILL_S), client(args.decode, None))
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
