# SPDX-License-Identifier: Apache-2.0
"""Reads request headers once: API key, body, and the headers that vLLM may see."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from vllm_metal.serving.refusal import Refusal

#: ASGI's pairs of lower-case name and value.
Pairs = Iterable[tuple[bytes, bytes]]
#: Longest key that is looked up; ours have 46 characters.
_MAX_KEY = 256
#: Headers that vLLM or its libraries read and a tenant may set. Excluded are keys, request ids
#: (the server makes them), and the data-parallel rank.
_PASSED = frozenset(
    (
        b"accept",
        b"endpoint-load-metrics-format",
        b"host",
        b"traceparent",
        b"tracestate",
        b"user-agent",
        b"x-session-id",
        b"x-vllm-priority",
    )
)
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: One answer for missing and wrong keys, so that it reveals nothing about keys.
NO_KEY = Refusal(
    401,
    "The API key is missing or wrong: send yours in the header 'Authorization: Bearer KEY', or "
    "'x-api-key'.",
)


@dataclass(frozen=True)
class Headers:
    """Parsed headers of a request."""

    has_controls: bool  # a value has control characters, which parsers may interpret differently
    api_key: str | None  # None: no key, several, or not one of ours by its form
    body: Refusal | None  # why the body is not plain JSON; None if it is, by its headers
    length: int | None  # length of the body in bytes; None: missing or invalid
    fresh: bool  # whether the client rejects cached responses (RFC 9111, 5.2.1)
    forwarded: tuple[tuple[bytes, bytes], ...]  # headers of a tenant that vLLM may see


def read(scope: Scope) -> Headers:
    """Parses a request's headers; rejects nothing, because that depends on the route."""
    values = defaultdict(list)
    for name, value in scope["headers"]:
        values[name].append(value)
    lengths = (value for value in values[b"content-length"] if value.isdigit() and len(value) < 20)
    caching = b"\n".join(values[b"cache-control"]).lower()
    return Headers(
        has_controls=any(_CONTROLS.search(value) for _, value in scope["headers"]),
        api_key=_api_key(values[b"authorization"], values[b"x-api-key"]),
        body=_why_not_json(values[b"content-type"], values[b"content-encoding"]),
        length=next(map(int, lengths), None),
        fresh=b"no-cache" in caching or b"no-store" in caching,
        forwarded=tuple(pair for pair in scope["headers"] if pair[0] in _PASSED),
    )


def _api_key(authorizations: Sequence[bytes], keys: Sequence[bytes]) -> str | None:
    schemes = [value.partition(b" ") for value in authorizations]
    if any(scheme.lower() != b"bearer" for scheme, _, _ in schemes):
        return None
    found = [value.strip() for value in (*(sent for _, _, sent in schemes), *keys)]
    if len(found) != 1 or not 0 < len(found[0]) <= _MAX_KEY or not found[0].isascii():
        return None
    return found[0].decode()


def _why_not_json(types: Sequence[bytes], encodings: Sequence[bytes]) -> Refusal | None:
    kind = types[0].split(b";")[0].strip().lower() if len(types) == 1 else b""
    if kind != b"application/json":
        return Refusal(400, "Content-Type must be application/json.")
    if any(value.lower() != b"identity" for value in encodings):
        return Refusal(400, "The body must not be compressed.")
    return None


def with_body(headers: Pairs, length: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers for a JSON body of `length` bytes that replaces the client's."""
    replaced = (b"content-length", b"content-type", b"transfer-encoding", b"x-request-id")
    kept = [(name, value) for name, value in headers if name not in replaced]
    return [
        *kept,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % length),
    ]
