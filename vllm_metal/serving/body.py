# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: read whole, parsed once, written anew.

What is checked here is what vLLM gets: it parses bytes that we wrote, so no two readers can
understand one body differently.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from vllm_metal.serving.refusal import Disconnected, Receive, Refusal

__all__ = ["MAX_DEPTH", "Disconnected", "parse", "read", "until_gone", "write"]

#: Objects and lists within each other; schemas of tools are the deepest that clients send.
MAX_DEPTH = 64


async def read(receive: Receive, limit: int, length: int | None) -> bytes:
    """All of a body.

    Args:
        receive: of the connection.
        limit: most bytes.
        length: what the client says it is; None: it does not say.

    Raises:
        Refusal: it is longer.
        Disconnected: the client went away before the end.
    """
    parts: list[bytes] = []
    total, more = 0, True
    if length is not None and length > limit:
        raise _too_long(limit)
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        total += len(parts[-1])
        if total > limit:
            raise _too_long(limit)
        more = message.get("more_body", False)
    return b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has gone.

    Args:
        receive: of a connection whose body has been read.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        Refusal: it is not one, has a key twice, is nested too deeply, or has numbers that JSON has
            not.
    """
    try:
        text = raw.decode()
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
        deep = raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _depth(found) > MAX_DEPTH
    except RecursionError:
        deep = True
    except Refusal:
        raise
    except ValueError:  # of the encoding, of JSON, or of a number with thousands of digits
        raise Refusal(400, "The body is not JSON in UTF-8.") from None
    if deep:
        raise Refusal(400, f"The body nests deeper than {MAX_DEPTH} objects and lists.")
    if not isinstance(found, dict):
        raise Refusal(400, "The body must be a JSON object.")
    return found


def write(fields: dict[str, Any]) -> bytes:
    """JSON in ASCII.

    Raises:
        Refusal: a number of it is too large for JSON.
    """
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise Refusal(400, "The body has a number that is too large.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Which of the two counts is left open by RFC 8259, section 4, so readers differ.
        raise Refusal(400, "An object in the body has a key twice.")
    return found


def _no_number(name: str) -> NoReturn:
    raise Refusal(400, "NaN and Infinity are not JSON.")


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
    return depth


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"The body is longer than {limit} bytes.")
