# SPDX-License-Identifier: Apache-2.0
"""Asks an OpenAI server: which model it has, its metrics, and an answer, piece by piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from vllm_metal.commands.chat import miss

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Until it is reached; an answer's first token may wait for a long queue.
_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0


class UpstreamError(Exception):
    """The server cannot be reached, or refuses; the message is for the user."""


@dataclass(frozen=True)
class Model:
    """What a server serves."""

    name: str
    context: int | None  # tokens; None: it does not tell


@dataclass(frozen=True)
class Reply:
    """The start of an answer, and the rest of it as it comes."""

    miss: dict[str, str | int] | None  # why the prompt's prefix was missed
    chunks: AsyncIterator[dict[str, Any]]  # as the OpenAI API has them


class Upstream:
    """A server, asked with the user's key; it is no part of what the page gets."""

    def __init__(self, url: str, key: str | None) -> None:
        """
        Args:
            url: of the server, with or without /v1.
            key: for its Authorization header; None: none.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            # Not through the user's proxy where the server is on this machine.
            trust_env=urlsplit(self.url).hostname not in _LOOPBACK,
        )

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def model(self) -> Model:
        """The first model that the server lists.

        Raises:
            UpstreamError: it cannot be asked, or lists none.
        """
        reply = await self._get("/v1/models")
        try:
            first = reply.json()["data"][0]
            return Model(first["id"], first.get("max_model_len"))
        except (ValueError, LookupError, TypeError) as error:
            raise UpstreamError(f"{self.url}/v1/models lists no model") from error

    async def metrics(self) -> str:
        """The text of /metrics.

        Raises:
            UpstreamError: it cannot be asked, or does not show it to this key.
        """
        return (await self._get("/metrics")).text

    @asynccontextmanager
    async def answer(self, body: Mapping[str, Any]) -> AsyncIterator[Reply]:
        """Asks for a streamed chat completion; leaving the block ends it at the server.

        Raises:
            UpstreamError: it cannot be asked, or refuses the request.
        """
        path = "/v1/chat/completions"
        try:
            async with self._client.stream("POST", path, json=body, headers=miss.ASKING) as reply:
                if reply.status_code != 200:
                    raise UpstreamError(_refusal(reply.status_code, await reply.aread()))
                yield Reply(miss.read(reply.headers.get(miss.NAME)), _chunks(reply))
        except httpx.HTTPError as error:
            raise UpstreamError(self._unreachable(error)) from error

    async def _get(self, path: str) -> httpx.Response:
        try:
            reply = await self._client.get(path, timeout=_SHORT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UpstreamError(self._unreachable(error)) from error
        if reply.status_code != 200:
            raise UpstreamError(_refusal(reply.status_code, reply.content))
        return reply

    def _unreachable(self, error: Exception) -> str:
        return f"the server at {self.url} does not answer ({type(error).__name__}: {error})"


async def _chunks(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise UpstreamError(_message(chunk) or data[:300])
            yield chunk


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = None
    message = message or content.decode(errors="replace")[:300]
    advice = ": name its key by the variable VLLM_API_KEY" if status in (401, 403) else ""
    return f"the server says {status}{advice}: {message}"


def _message(fields: Any) -> str | None:
    """The text of an error as the OpenAI API writes it."""
    error = fields.get("error") if isinstance(fields, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
