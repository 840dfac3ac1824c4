# SPDX-License-Identifier: Apache-2.0
"""Headers of requests: the API key in them, and those that vLLM gets to see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_metal.serving.refusal import Refusal

Headers = Sequence[tuple[bytes, bytes]]
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
_CONTROLS = frozenset(range(32)) - {9} | {127}
#: Who has no valid key is not told why.
NO_KEY = Refusal(401, "Send an API key: the header 'Authorization: Bearer KEY', or 'x-api-key'.")


def api_key(headers: Headers) -> str:
    """The API key that a request carries.

    Raises:
        Refusal: there is none, there are several, or it cannot be one of ours.
    """
    found = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise NO_KEY
            found.append(credentials.strip())
        elif name == b"x-api-key":
            found.append(value.strip())
    if len(found) != 1 or not 0 < len(found[0]) <= _MAX_KEY or not found[0].isascii():
        raise NO_KEY
    return found[0].decode()


def check(headers: Headers) -> None:
    """Refuses what could be read in two ways.

    Raises:
        Refusal: a value has control characters, or the body is compressed, or not said to be JSON.
    """
    if any(_CONTROLS & set(value) for _, value in headers):
        raise Refusal(400, "A header has control characters in it.")


def check_json(headers: Headers) -> None:
    """Refuses bodies that are not plain JSON.

    Raises:
        Refusal: the headers say so.
    """
    kinds = [value for name, value in headers if name == b"content-type"]
    kind = kinds[0].split(b";")[0].strip().lower() if len(kinds) == 1 else b""
    if kind != b"application/json":
        raise Refusal(400, "Content-Type must be application/json.")
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers):
        raise Refusal(400, "The body must not be compressed.")


def content_length(headers: Headers) -> int | None:
    """What the client says of the body's length; None: nothing that can be understood."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return None


def wants_fresh(headers: Headers) -> bool:
    """Whether the client asks for an answer that was not kept (RFC 9111, section 5.2.1)."""
    values = [value.lower() for name, value in headers if name == b"cache-control"]
    return any(b"no-cache" in value or b"no-store" in value for value in values)


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of a tenant's request that vLLM gets to see."""
    return [(name, value) for name, value in headers if name in _PASSED]


def with_body(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """The same for a body of JSON that the server wrote.

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
