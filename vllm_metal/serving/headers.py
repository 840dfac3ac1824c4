# SPDX-License-Identifier: Apache-2.0
"""Headers of requests: read once for the API key, the body, and what vLLM gets to see."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Scope

from vllm_metal.serving.refusal import Refusal

#: Names in lower case, and values, as ASGI has them.
Pairs = Iterable[tuple[bytes, bytes]]
#: Ours have 46 characters.
_MAX_KEY = 256
#: What vLLM, or a library below it, reads and a tenant may say. Left out are keys, ids of requests
#: (the server makes them), and the rank that picks an engine.
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
#: Who has no valid key is not told why.
NO_KEY = Refusal(
    401,
    "The API key is missing or wrong: send yours in the header 'Authorization: Bearer KEY', or "
    "'x-api-key'.",
)


@dataclass(frozen=True)
class Headers:
    """What a request's headers say."""

    has_controls: bool  # control characters are in a value, so it could be read in two ways
    api_key: str | None  # None: there is none, there are several, or it cannot be one of ours
    body: Refusal | None  # why the body is not plain JSON; None: it is said to be
    length: int | None  # of the body, in bytes; None: nothing that can be understood
    fresh: bool  # whether the client asks for an answer that was not kept (RFC 9111, 5.2.1)
    passed_on: tuple[tuple[bytes, bytes], ...]  # those of a tenant's request that vLLM may see


def read(scope: Scope) -> Headers:
    """Reads a request's headers. It refuses nothing: what matters depends on the route."""
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
        passed_on=tuple(pair for pair in scope["headers"] if pair[0] in _PASSED),
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
    """Returns headers for a body of JSON that the server wrote.

    Args:
        headers: of the request.
        length: of the body, in bytes.
    """
    replaced = (b"content-length", b"content-type", b"transfer-encoding", b"x-request-id")
    kept = [(name, value) for name, value in headers if name not in replaced]
    return [
        *kept,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % length),
    ]
