# SPDX-License-Identifier: Apache-2.0
"""Asks an OpenAI server: which model it has, its metrics, and an answer, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import httpx

from vllm_metal.cli.chat import miss

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Until it is reached; an answer's first token may wait for a long queue.
_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0
#: Parameters of a model below a billion, as in SmolLM2-135M-Instruct; "1M" is a context's length.
_MILLIONS = re.compile(r"(?<![\w.])(\d{2,3})M(?![a-z])", re.IGNORECASE)
#: Longest answer of such a model unless the user sets another: it may never come to an end.
_SMALL_MODEL_TOKENS = 1024
_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens")


class UpstreamError(Exception):
    """The server cannot be reached, or refuses; the message is for the user."""


@dataclass(frozen=True)
class Model:
    """What a server serves."""

    name: str
    context: int | None  # tokens; None: it does not tell

    @property
    def label(self) -> str:
        """The name that people know it by: without owner, folders and the hub's cache."""
        parts = PurePath(self.name).parts or ("",)
        for part in parts:
            if part.startswith("models--"):
                return part.rsplit("--", 1)[-1]
        return parts[-1]

    @property
    def millions(self) -> int | None:
        """Millions of parameters, where the name says that it has fewer than a billion."""
        found = _MILLIONS.search(self.label)
        return int(found[1]) if found else None

    @property
    def max_tokens(self) -> int | None:
        """The longest answer where the user sets none; None: up to the end of the context.

        A limit would cut a reasoning model amid its reasoning, so only small models have one.
        """
        return None if self.millions is None else self.at_most(_SMALL_MODEL_TOKENS)

    def at_most(self, max_tokens: int) -> int:
        """`max_tokens`, or the context where that is less: vLLM refuses more."""
        return max_tokens if self.context is None else min(max_tokens, self.context)


@dataclass(frozen=True)
class Reply:
    """The start of an answer, and the rest of it as it comes."""

    miss: dict[str, str | int] | None  # why the prompt's prefix was missed
    chunks: AsyncIterator[dict[str, Any]]  # as the OpenAI API has them


class Upstream:
    """A server, asked with the user's key; it is no part of what the page gets."""

    def __init__(self, url: str, key: str | None, socket: Path | None = None) -> None:
        """
        Args:
            url: of the server, with or without /v1.
            key: for its Authorization header; None: none.
            socket: the Unix socket that it listens on; None: it listens at its address.

        Raises:
            ValueError: `url` is not the address of a server.
        """
        if not _is_address(url):
            raise ValueError(f"{url} is not the address of a server: write --url http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._own = socket is not None  # it ends with this process, and this one with it
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            transport=None if socket is None else httpx.AsyncHTTPTransport(uds=str(socket)),
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
            raise UpstreamError(f"{self.url}/v1/models lists no model.") from error

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
        path, begun = "/v1/chat/completions", False
        try:
            async with self._client.stream("POST", path, json=body, headers=miss.ASKING) as reply:
                if reply.status_code != 200:
                    raise UpstreamError(_refusal(reply.status_code, await reply.aread()))
                begun = True
                yield Reply(miss.read(reply.headers.get(miss.NAME)), _chunks(reply))
        except httpx.HTTPError as error:
            raise UpstreamError(self._unreachable(error, begun)) from error

    async def _get(self, path: str) -> httpx.Response:
        try:
            reply = await self._client.get(path, timeout=_SHORT_SECONDS)
        except httpx.HTTPError as error:
            raise UpstreamError(self._unreachable(error)) from error
        if reply.status_code != 200:
            raise UpstreamError(_refusal(reply.status_code, reply.content))
        return reply

    def _unreachable(self, error: Exception, begun: bool = False) -> str:
        """What a user reads of a server that is not there, or went away amid an answer."""
        if isinstance(error, httpx.TimeoutException):
            return f"The server at {self.url} did not answer in time. Try again."
        if self._own:
            found = "ended in the middle of the answer" if begun else "has ended"
            return f"The model's server {found}. Run vllm-metal chat again."
        found = "ended in the middle of the answer" if begun else "does not answer"
        return f"The server at {self.url} {found}. Start it again, then try again."


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


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
    if found := _TOO_LONG.search(message):
        return (
            f"The conversation is longer than the model's context of {found[1]} tokens. Start a "
            "new conversation, shorten a message, or restart with a larger --max-model-len."
        )
    if status in (401, 403):
        return f"The server says {status}: {message}. Set VLLM_API_KEY to its key and start again."
    return f"The server says {status}: {message}"


def _message(fields: Any) -> str | None:
    """The text of an error as the OpenAI API writes it."""
    error = fields.get("error") if isinstance(fields, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
