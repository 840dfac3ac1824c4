# SPDX-License-Identifier: Apache-2.0
"""Ray Serve's two deployments: replicas, each with its own `vllm serve`, and their front end."""

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
END_S = 5.0  # many times what it takes until a process that was killed is known to be
#: What vLLM's streams begin an error with: of OpenAI's kinds, and of others.
ERRORS = (b'data: {"error"', b"event: error")
IDLE_S = 4.0  # vLLM ends idle connections after 5 (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)
#: Headers of one connection (RFC 9110, 7.6.1), and those that each end of one writes itself.
OF_A_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "date", "server"),
    }
)


class Replica:
    """One `vllm serve` on this machine, and the way to it. Where one ends, so does the other."""

    async def __init__(self, arguments: Sequence[str], folder: str) -> None:
        """Starts the server, and waits until it answers.

        Args:
            arguments: of `vllm serve`.
            folder: to start it in, where this machine has it: paths among `arguments` begin there.
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
        # A prompt may take minutes; the server has a limit of its own, `timeout_s`.
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
        )
        self._end = asyncio.create_task(self._end_with_the_server())
        while not await self._is_healthy():
            await asyncio.sleep(POLL_S)

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """The server's answer: its head, then its body as it comes.

        Raises:
            Gone: the server ended, or its engine did; nothing more will come.
        """
        sent = self._client.stream(
            asked.method, asked.target, headers=asked.headers, content=asked.body
        )
        try:
            async with sent as reply:
                failed = reply.status_code == 500
                yield Head(self._name, reply.status_code, passed_on(reply.headers.multi_items()))
                async for piece in reply.aiter_raw():
                    # A step may fail, but without an engine every request does.
                    if (failed or piece.startswith(ERRORS)) and not await self._is_healthy():
                        raise httpx.ReadError("the engine has ended, and the server will")
                    yield piece
        except httpx.TransportError as error:
            if not await self._is_healthy():
                # Rather than fail whatever comes, it waits for its end: from then on Ray sends
                # nothing here. Others, whom nobody can reach, fail after it.
                await asyncio.sleep(END_S)
            raise Gone from error

    async def _is_healthy(self) -> bool:
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def _end_with_the_server(self) -> None:
        """Ends this process once the guard says that the server has: Ray starts another replica."""
        assert self._guard.stdout is not None
        await self._guard.stdout.read()
        os._exit(1)


class Front:
    """What clients talk to: asks replicas, again where one did not answer."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        if not path.startswith("/v1/") and path != "/health":  # /metrics is each server's own
            found = refusal(404, "Not found.")
        else:
            target = f"{path}?{request.url.query}" if request.url.query else path
            headers = passed_on(request.headers.items())
            asked = Asked(request.method, target, headers, await request.body())
            found = await answer(self._send, asked)
        kind = Response if isinstance(found.body, bytes) else StreamingResponse
        response = kind(found.body, found.head.status)
        response.raw_headers += [  # a mapping would have each name once
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in found.head.headers
        ]
        return response

    async def _send(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        try:
            async for piece in self._replicas.answer.remote(asked):
                yield piece
        except RayActorError as error:  # the replica's process or machine is not there
            raise Gone from error


class Elsewhere(RequestRouter):
    """Picks, of two replicas not asked yet, or of any two, the one with fewer open requests.

    Ray's own, power of two choices, does the same among all, nearby ones first; a replica that
    refuses requests has few of them open, and would be asked again.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request:  # where all are full, Ray waits ever longer before it asks them again
            pending_request.routing_context.should_backoff = True
        asked = pending_request.args[0] if pending_request else None
        avoid = asked.avoid if isinstance(asked, Asked) else frozenset()
        others = [one for one in candidate_replicas if one.replica_id.unique_id not in avoid]
        chosen_of = others or candidate_replicas
        return [random.sample(chosen_of, min(2, len(chosen_of)))]


def passed_on(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Headers that go on to the next connection."""
    return tuple((name, value) for name, value in headers if name.lower() not in OF_A_CONNECTION)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
