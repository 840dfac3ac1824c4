# SPDX-License-Identifier: Apache-2.0
"""Draws varied requests and misbehaving clients from a seed."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

#: Client behaviors. There are three places to hang up.
Manner = Literal[
    "reads", "reads slowly", "never reads", "sends slowly", "never ends its body",
    "hangs up in its body", "hangs up at once", "hangs up in the answer",
]  # fmt: skip
#: In prompts and in names of tools and models: must not appear in a log.
MARK = "purple elephant"
CLIENT_SALTS = ("", "my-own-salt", "x", MARK)  # the last two where any text is allowed
_ABORTED = 0.3  # share of requests
_RARE: tuple[Manner, ...] = ("reads slowly", "never reads", "sends slowly", "never ends its body")
_HANGS_UP: tuple[Manner, ...] = (
    *("hangs up in its body", "hangs up at once"),
    *("hangs up in the answer",) * 3,
)
_PATIENCE_S = 60.0  # timeout of a client that waits for an end


@dataclass(frozen=True)
class Planned:
    """A planned request."""

    tenant: str | None  # None: an invalid key
    path: str
    body: bytes
    manner: Manner = "reads"
    after: int = 0  # bytes of the answer before the client hangs up


@dataclass(frozen=True)
class Seen:
    """The result of a request."""

    planned: Planned
    status: int | None  # None: the client left before it
    seconds: float  # from the last byte sent to the last one read
    headers: bytes = b""
    body: bytes = b""


def plan(number: int, tenants: Sequence[str], seed: int) -> Iterator[list[Planned]]:
    """Yields groups of identical requests, to be sent at once.

    Args:
        number: total number of requests.
        tenants: their tenants.
        seed: seed of the generator.
    """
    rng, made = random.Random(seed), 0
    while made < number:
        one = _request(rng, rng.choice(tenants), made)
        group = [one]
        if rng.random() < 0.08:  # the others stay, whatever the first does
            others = min(rng.choice((1, 2, 4)), number - made - 1)
            group += [replace(one, manner="reads")] * others
        made += len(group)
        yield group


def _request(rng: random.Random, tenant: str, number: int) -> Planned:
    api = rng.choice((_chat, _chat, _completion, _completion, _messages, _responses))
    path, fields = api(rng, f"Tell of the {MARK} {rng.randrange(40) if _odds(rng, 2) else number}.")
    manner = _manner(rng)
    if manner == "never reads":  # an answer that fills the buffers of both sockets
        text = MARK + "=" * 60_000  # 64 of these are one token
        long = {"prompt": text, "max_tokens": 1, "echo": True, "n": 40, "seed": 5}
        path, fields = "/v1/completions", {"model": "m", **long}
    elif rng.random() < 0.01:  # longer than the time limit
        name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        fields |= {name: 20_000, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields, separators=(",", ":")).encode()
    if rng.random() < 0.1:
        body = _malformed(rng, fields, body)
    return Planned(
        tenant=None if rng.random() < 0.02 else tenant,
        path=path,
        body=body,
        manner=manner,
        after=rng.choice((1, 200, 1000)),
    )


def _manner(rng: random.Random) -> Manner:
    drawn = rng.random()
    if drawn < _ABORTED:
        return rng.choice(_HANGS_UP)
    return rng.choice(_RARE) if drawn < _ABORTED + 0.03 else "reads"


def _odds(rng: random.Random, one_in: int) -> bool:
    return rng.randrange(one_in) == 0


def _common(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": rng.choice((1, 2, 8, 24)),
        "temperature": rng.choice((0, 0, "0", 1, 0.7)),
        "stream": rng.choice((False, False, True, True, "false", "true")),
    }
    if _odds(rng, 10):
        fields["cache_salt"] = CLIENT_SALTS[1]
    return fields


def _sampled(rng: random.Random) -> dict[str, Any]:
    fields = _common(rng)
    if fields["stream"] in (True, "true") and _odds(rng, 2):
        fields["stream_options"] = {"include_usage": rng.choice((True, False, "false", "yes"))}
    for name, value in (
        ("n", rng.choice((2, 3))),
        ("seed", rng.choice((1, -1, "-1"))),
        ("stop", ["e"]),
        ("logprobs", 2),
        ("ignore_eos", True),
    ):
        if _odds(rng, 6):
            fields[name] = value
    return fields


def _chat(rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
    fields = _sampled(rng) | {"messages": [{"role": "user", "content": text}]}
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": 2}
    if _odds(rng, 12):  # arguments that are not JSON
        call = {"name": MARK, "arguments": "{"}
        calls = [{"id": MARK, "type": "function", "function": call}]
        fields["messages"].append({"role": "assistant", "tool_calls": calls})
        fields["messages"].append({"role": "tool", "tool_call_id": MARK, "content": "x"})
    return "/v1/chat/completions", fields


def _completion(rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
    prompt: Any = rng.choice((text, [text, "Once"], [5, 6, 7], [[5, 6], [7]]))
    return "/v1/completions", _sampled(rng) | {"prompt": prompt}


def _messages(rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", _common(rng) | {"messages": [{"role": "user", "content": text}]}


def _responses(rng: random.Random, text: str) -> tuple[str, dict[str, Any]]:
    fields = _common(rng) | {"input": text, "store": False}
    fields["max_output_tokens"] = fields.pop("max_tokens")
    if _odds(rng, 3):
        fields |= {"background": rng.choice((True, "true")), "store": True, "stream": False}
    return "/v1/responses", fields


def _malformed(rng: random.Random, fields: dict[str, Any], body: bytes) -> bytes:
    """Returns a body that vLLM or the middleware rejects or reads in a special way."""
    name = rng.choice([*fields, "n", "stop", "tools", "response_format", "cache_salt"])
    wrong = rng.choice((None, "", "x", -1, 0, 2**70, [], {}, [{}] * 50, {"a": [1]}, MARK, True))
    return rng.choice(
        (
            json.dumps(fields | {name: wrong}).encode(),
            json.dumps(fields | {name: wrong}).encode(),
            json.dumps({key: value for key, value in fields.items() if key != name}).encode(),
            json.dumps(fields | {"model": MARK}).encode(),
            json.dumps(fields | {"x": [{}] * 20_000}).encode(),
            body[: rng.randrange(len(body))],
            body[:-1] + b',"model":"m"}',
            b'{"x":' + b"[" * 100 + b"]" * 100 + b"," + body[1:],
            body.replace(b'"m"', b"NaN"),
            body + b"\xff",
        )
    )


@dataclass
class Clients:
    """Sends groups with limited concurrency."""

    url: str
    keys: Mapping[str, str]
    seen: list[Seen] = field(default_factory=list)

    async def run(self, groups: Iterator[list[Planned]], at_once: int) -> None:
        """Sends all groups; their results are in `seen`."""

        async def work() -> None:
            for group in groups:
                self.seen += await asyncio.gather(*(self._send(one) for one in group))

        await asyncio.gather(*(work() for _ in range(at_once)))

    async def _send(self, one: Planned) -> Seen:
        parts = urlsplit(self.url)
        connection = socket.socket()
        if one.manner in ("reads slowly", "never reads"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, (parts.hostname, parts.port))
            return await asyncio.wait_for(_Client(connection, one).talk(self.keys), _PATIENCE_S)
        finally:
            connection.close()


class _Client:
    """One connection."""

    def __init__(self, connection: socket.socket, one: Planned) -> None:
        self._connection, self._one = connection, one
        self._loop = asyncio.get_running_loop()

    async def talk(self, keys: Mapping[str, str]) -> Seen:
        one, key = self._one, "vm-none" if self._one.tenant is None else keys[self._one.tenant]
        head = (
            f"POST {one.path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(one.body)}\r\n"
            "connection: close\r\n\r\n"
        ).encode()
        half = len(one.body) // 2
        await self._loop.sock_sendall(self._connection, head + one.body[:half])
        if one.manner == "hangs up in its body":
            return Seen(one, None, 0.0)
        if one.manner == "sends slowly":
            await asyncio.sleep(0.3)
        if one.manner != "never ends its body":
            await self._loop.sock_sendall(self._connection, one.body[half:])
        sent = time.monotonic()
        if one.manner == "hangs up at once":
            return Seen(one, None, 0.0)
        answer = await self._answer()
        if one.manner in ("hangs up in the answer", "never reads"):
            return Seen(one, None, 0.0)
        headers, _, body = answer.partition(b"\r\n\r\n")
        status = int(headers.split(b" ", 2)[1]) if headers else None
        return Seen(one, status, time.monotonic() - sent, headers, body)

    async def _answer(self) -> bytes:
        one, answer = self._one, b""
        if one.manner == "never reads":
            await asyncio.sleep(3)
            return answer
        while part := await self._part():
            answer += part
            if one.manner == "hangs up in the answer" and len(answer) >= one.after:
                break
            if one.manner == "reads slowly" and len(answer) < 500:
                await asyncio.sleep(0.2)
        return answer

    async def _part(self) -> bytes:
        size = 100 if self._one.manner == "reads slowly" else 1 << 16
        try:
            return await self._loop.sock_recv(self._connection, size)
        except ConnectionError:  # the server hung up
            return b""
