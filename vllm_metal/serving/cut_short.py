# SPDX-License-Identifier: Apache-2.0
"""Says of a response that the server ended that it is not whole.

vLLM calls a response of the Responses API "completed" when its request was aborted; other APIs have
a finish reason.
"""

from __future__ import annotations

import json
from typing import Any

_COMPLETED = b"event: response.completed\n"
_DATA = b"data: "


def incomplete(part: bytes) -> bytes:
    """A response, or an event of its stream, with the status "incomplete" for "completed"."""
    if part.startswith(_COMPLETED):
        event = _object(part[len(_COMPLETED) :].strip().removeprefix(_DATA))
        if event is None or not isinstance(event.get("response"), dict):
            return part
        event = event | {
            "type": "response.incomplete",
            "response": event["response"] | _STATUS,
        }
        return b"event: response.incomplete\n" + _DATA + _compact(event) + b"\n\n"
    response = _object(part) if part.startswith(b"{") else None
    if response is None or response.get("status") != "completed":
        return part
    return _compact(response | _STATUS)


_STATUS = {"status": "incomplete", "incomplete_details": {"reason": "timeout"}}


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _compact(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
