# SPDX-License-Identifier: Apache-2.0
"""Reads, parses and rewrites request bodies.

vLLM parses the bytes that this module writes, not the client's, so that vLLM and this module cannot
interpret a body differently.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.types import Message, Receive

from vllm_metal.serving.config import BodyLimits
from vllm_metal.serving.refusal import Refusal

#: A JSON string. An unterminated one extends to the end of the text, so that no part is scanned
#: twice and matching stays linear.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read(receive: Receive, limits: BodyLimits, length: int | None) -> bytes:
    """Reads a whole body; `length` is its Content-Length, if any.

    Raises Refusal if the body is too long or takes too long, ClientDisconnect if the client leaves.
    """
    if length is not None and length > limits.max_body_bytes:
        raise _too_long(limits)
    try:
        async with asyncio.timeout(limits.max_body_s):
            return await _read(receive, limits)
    except TimeoutError:
        message = f"The body took longer than {limits.max_body_s:g} s to arrive (max_body_s)."
        raise Refusal(408, message) from None


async def _read(receive: Receive, limits: BodyLimits) -> bytes:
    parts, total = [], 0
    async for part in Request({"type": "http"}, receive).stream():
        parts.append(part)
        total += len(part)
        if total > limits.max_body_bytes:
            raise _too_long(limits)
    return b"".join(parts)


def replayed(written: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields the body `written`, then the client's disconnect."""
    given = False

    async def messages() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": written, "more_body": False}
        await wait_for_disconnect(receive)
        return {"type": "http.disconnect"}

    return messages


async def wait_for_disconnect(receive: Receive) -> None:
    """Waits until the client disconnects; call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def parse(raw: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Parses a body.

    Raises Refusal if the body is no JSON object, has duplicate keys or NaN, or exceeds `limits`.
    """
    _check_size(raw, limits)
    try:
        found = json.loads(
            raw.decode(), object_pairs_hook=_unique_keys, parse_constant=_reject_constant
        )
    except RecursionError:
        raise _too_deep(limits) from None
    except Refusal:
        raise
    except ValueError:  # not UTF-8, not JSON, or a number with thousands of digits
        raise Refusal(400, "The body is not JSON in UTF-8.") from None
    if not isinstance(found, dict):
        raise Refusal(400, "The body must be a JSON object.")
    _check_structure(found, limits)
    return found


def write(fields: dict[str, Any]) -> bytes:
    """Returns ASCII JSON; raises Refusal if a number is too large for JSON."""
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise Refusal(400, "The body has a number that is too large.") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # RFC 8259, section 4, does not say which of the two counts, so parsers differ.
        raise Refusal(400, "An object in the body has a key twice.")
    return found


def _reject_constant(name: str) -> NoReturn:
    raise Refusal(400, "NaN and Infinity are not JSON.")


def _check_size(raw: bytes, limits: BodyLimits) -> None:
    # Punctuation is counted before parsing, as parsing already allocates every value.
    if _sizes(raw, limits) is not None:
        # Punctuation inside strings does not count, and prompts with code are full of it. Removing
        # the strings is slower, so only bodies that look too large pay for it.
        refused = _sizes(_STRING.sub(b"", raw), limits)
        if refused is not None:
            raise refused


def _sizes(raw: bytes, limits: BodyLimits) -> Refusal | None:
    opened = raw.count(b"{") + raw.count(b"[")
    if opened + raw.count(b",") > limits.max_body_values:
        return Refusal(
            400, f"The body has more than {limits.max_body_values} values (max_body_values)."
        )
    if opened + raw.count(b":") > limits.max_body_names:
        return Refusal(
            400,
            f"The body has more than {limits.max_body_names} objects, lists and names in objects "
            "(max_body_names).",
        )
    return None


def _check_structure(body: dict[str, Any], limits: BodyLimits) -> None:
    depth, items, level = 0, 0, [body]
    while level:
        depth += 1
        if depth > limits.max_body_depth:
            raise _too_deep(limits)
        below: list[Any] = []
        for parent in level:
            if isinstance(parent, dict):
                below += [child for child in parent.values() if isinstance(child, dict | list)]
            else:
                found = [child for child in parent if isinstance(child, dict | list)]
                items += len(found)
                below += found
        if items > limits.max_body_items:
            raise Refusal(
                400,
                f"Lists in the body have more than {limits.max_body_items} objects and lists in "
                "them (max_body_items).",
            )
        level = below


def _too_deep(limits: BodyLimits) -> Refusal:
    depth = limits.max_body_depth
    return Refusal(400, f"The body nests deeper than {depth} objects and lists (max_body_depth).")


def _too_long(limits: BodyLimits) -> Refusal:
    return Refusal(413, f"The body is longer than {limits.max_body_bytes} bytes (max_body_bytes).")
