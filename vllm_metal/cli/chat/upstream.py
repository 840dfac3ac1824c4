# SPDX-License-Identifier: Apache-2.0
"""Client of an OpenAI-compatible server: its model, its metrics, and streamed answers."""

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
#: Timeout of connections only; the first token of an answer may wait in a long queue.
_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0
#: Parameter count below a billion, as in SmolLM2-135M-Instruct. "1M" is the length of a context, so
#: one digit does not match.
_MILLIONS = re.compile(r"(?<![\w.])(\d{2,3})M(?![a-z])", re.IGNORECASE)
#: Default limit of such a model's answers, which may never end by themselves.
_SMALL_MODEL_TOKENS = 1024
_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens")


class UpstreamError(Exception):
    """The server cannot be reached, or rejects the request; the message is for the user."""


@dataclass(frozen=True)
class Model:
    """A model that a server serves."""

    name: str
    context: int | None  # tokens; None: unknown

    @property
    def label(self) -> str:
        """The short name: without owner, folders and the cache's prefix."""
        parts = PurePath(self.name).parts or ("",)
        for part in parts:
            if part.startswith("models--"):
                return part.rsplit("--", 1)[-1]
        return parts[-1]

    @property
    def millions(self) -> int | None:
        """Millions of parameters according to the name; None if unknown, or a billion or more."""
        found = _MILLIONS.search(self.label)
        return int(found[1]) if found else None

    @property
    def max_tokens(self) -> int | None:
        """Default limit of an answer in tokens; None: the rest of the context."""
        # Only for small models: a limit would cut a reasoning model in the middle of its reasoning.
        return None if self.millions is None else self.at_most(_SMALL_MODEL_TOKENS)

    def at_most(self, max_tokens: int) -> int:
        """Caps `max_tokens` at the context; vLLM rejects more."""
        return max_tokens if self.context is None else min(max_tokens, self.context)


@dataclass(frozen=True)
class Reply:
    """The response to a chat completion request, still streaming."""

    miss: dict[str, str | int] | None  # why the prompt's prefix was missed
    chunks: AsyncIterator[dict[str, Any]]  # in the format of the OpenAI API


class Upstream:
    """A model server, called with the user's API key; the chat page never receives the key."""

    def __init__(self, url: str, key: str | None, socket: Path | None = None) -> None:
        """Opens a client; raises ValueError if `url` is not the address of a server.

        Args:
            url: with or without /v1.
            key: for the Authorization header; None for no header.
            socket: Unix socket that the server listens on; None for its address.
        """
        if not _is_address(url):
            raise ValueError(f"{url} is not the address of a server: write --url http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._own = socket is not None  # we started it, and it ends with this process
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            transport=None if socket is None else httpx.AsyncHTTPTransport(uds=str(socket)),
            # Bypasses the user's proxy for a server on this machine.
            trust_env=urlsplit(self.url).hostname not in _LOOPBACK,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def model(self) -> Model:
        """Returns the first model that the server lists; raises UpstreamError if there is none."""
        reply = await self._get("/v1/models")
        try:
            first = reply.json()["data"][0]
            return Model(first["id"], first.get("max_model_len"))
        except (ValueError, LookupError, TypeError) as error:
            raise UpstreamError(
                f"{self.url} serves no model: name another server by --url."
            ) from error

    async def metrics(self) -> str:
        """Returns the text of /metrics; raises UpstreamError if the server does not show it."""
        return (await self._get("/metrics")).text

    @asynccontextmanager
    async def answer(self, body: Mapping[str, Any]) -> AsyncIterator[Reply]:
        """Requests a streamed chat completion; leaving the block cancels it.

        Raises UpstreamError if the server cannot be reached or rejects the request.
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

    def _unreachable(self, error: Exception, started: bool = False) -> str:
        if isinstance(error, httpx.TimeoutException):
            return f"The server at {self.url} did not answer in time. Try again."
        if self._own:
            what = "ended in the middle of the answer" if started else "has ended"
            return f"The model's server {what}. Run vllm-metal chat again."
        what = "ended in the middle of the answer" if started else "does not answer"
        return f"The server at {self.url} {what}. Start it again, then try again."


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
    error = fields.get("error") if isinstance(fields, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
