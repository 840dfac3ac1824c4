# SPDX-License-Identifier: Apache-2.0
"""Ray Serve deployments: replicas with a `vllm serve` each, and their front end."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import httpx
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from relay import Asked, Gone, Head, answer, refusal
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.25
CONNECT_S = 5.0
END_S = 5.0  # far longer than noticing a killed process takes
#: Starts of error events in vLLM's streams, for OpenAI's and other APIs.
ERRORS = (b'data: {"error"', b"event: error")
IDLE_S = 4.0  # vLLM ends idle connections after 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
#: Hop-by-hop headers (RFC 9110, 7.6.1), and those that each side sets itself.
OF_A_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "date", "server"),
    }
)


class Replica:
    """A `vllm serve` on this machine. The replica and the server end together."""

    async def __init__(self, arguments: Sequence[str], folder: str) -> None:
        """Starts the server, and waits until it answers.

        Args:
            arguments: arguments of `vllm serve`.
            folder: working directory, if it exists on this machine; relative paths start here.
        """
        self._name = serve.get_replica_context().replica_id.unique_id
        port = _free_port()
        listen = ("--host", "127.0.0.1", "--port", str(port))
        self._guard = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GUARD), *VLLM, *arguments, *listen),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder if Path(folder).is_dir() else None,
        )
        # A prompt may take minutes; the server has its own limit, `timeout_s`.
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
        )
        self._end = asyncio.create_task(self._end_with_the_server())
        while not await self._is_healthy():
            await asyncio.sleep(POLL_S)

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """Yields the server's answer: its head, then its body as it arrives.

        Raises:
            Gone: the server or its engine ended.
        """
        sent = self._client.stream(
            asked.method, asked.target, headers=asked.headers, content=asked.body
        )
        try:
            async with sent as reply:
                failed = reply.status_code == 500
                yield Head(self._name, reply.status_code, passed_on(reply.headers.multi_items()))
                async for piece in reply.aiter_raw():
                    # A single step may fail, but without an engine every request does.
                    if (failed or piece.startswith(ERRORS)) and not await self._is_healthy():
                        raise httpx.ReadError("the engine has ended, and the server will")
                    yield piece
        except httpx.TransportError as error:
            if not await self._is_healthy():
                # Wait for the server's end instead of failing new requests: Ray then sends
                # no more. Afterwards, requests that reach no replica fail.
                await asyncio.sleep(END_S)
            raise Gone from error

    async def _is_healthy(self) -> bool:
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def _end_with_the_server(self) -> None:
        """Exits when the guard reports the server's end, so that Ray starts another replica."""
        assert self._guard.stdout is not None
        await self._guard.stdout.read()
        os._exit(1)


class Front:
    """Receives clients' requests and forwards them, retrying on other replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        if not path.startswith("/v1/") and path != "/health":  # /metrics is per server
            found = refusal(404, "Not found.")
        else:
            target = f"{path}?{request.url.query}" if request.url.query else path
            headers = passed_on(request.headers.items())
            asked = Asked(request.method, target, headers, await request.body())
            found = await answer(self._send, asked)
        kind = Response if isinstance(found.body, bytes) else StreamingResponse
        response = kind(found.body, found.head.status)
        response.raw_headers += [  # a mapping would drop repeated names
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in found.head.headers
        ]
        return response

    async def _send(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        try:
            async for piece in self._replicas.answer.remote(asked):
                yield piece
        except RayActorError as error:  # the replica's process or machine is gone
            raise Gone from error


class Elsewhere(RequestRouter):
    """Picks the less busy of two replicas, preferring ones not yet tried for this request.

    Ray's power of two choices picks among all, nearby ones first; a replica that rejects requests
    has few open ones, and would be picked again.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request:  # if all are full, Ray's backoff keeps growing
            pending_request.routing_context.should_backoff = True
        asked = pending_request.args[0] if pending_request else None
        avoid = asked.avoid if isinstance(asked, Asked) else frozenset()
        others = [one for one in candidate_replicas if one.replica_id.unique_id not in avoid]
        chosen_of = others or candidate_replicas
        return [random.sample(chosen_of, min(2, len(chosen_of)))]


def passed_on(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns the headers to forward."""
    return tuple((name, value) for name, value in headers if name.lower() not in OF_A_CONNECTION)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
