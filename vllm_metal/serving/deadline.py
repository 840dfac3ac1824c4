# SPDX-License-Identifier: Apache-2.0
"""Ends requests that take longer than the server allows, by aborting them in the engine.

vLLM then sends the response so far, with finish reason "abort" and the usage, and frees the blocks.
"length" would mean that the client's own limit was reached, and an error would discard the text.
vLLM still marks a response of the Responses API as "completed": `incomplete` corrects that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Sleep = Callable[[float], Awaitable[None]]
#: Interval between aborts: a request may still be on its way to the engine when its time is up.
_RETRY_S = 0.25
#: Time for an aborted request to send its end before it is cut off.
GRACE_S = 5.0
_COMPLETED = b"event: response.completed\n"
_DATA = b"data: "
_STATUS = {"status": "incomplete", "incomplete_details": {"reason": "timeout"}}


class Deadline:
    """The time limit of one request."""

    def __init__(self, limit_s: float | None, sleep: Sleep = asyncio.sleep) -> None:
        """Needs a running event loop, and does not start the clock; `limit_s` None: no limit."""
        self._limit_s, self._sleep = limit_s, sleep
        self._task: asyncio.Task[None] | None = None
        self._is_background = False
        self._aborted = self._had_tokens = False
        loop = asyncio.get_running_loop()
        #: Done when the time is up.
        self.expired: asyncio.Future[None] = loop.create_future()
        #: Done when the request did not end although it was aborted: its connection must end.
        self.cut: asyncio.Future[None] = loop.create_future()

    @property
    def limited(self) -> bool:
        """Whether there is a time limit."""
        return self._limit_s is not None

    @property
    def aborted_before_output(self) -> bool:
        """Whether the request was aborted before its first output token."""
        return self._aborted and not self._had_tokens

    def start(self, request_id: str, engine: AsyncLLM, on_expiry: Callable[[], None]) -> None:
        """Starts the clock.

        Args:
            request_id: id made by the server; all of the request's ids in the engine contain it.
            engine: aborts the request.
            on_expiry: called when the time is up.
        """
        if self._limit_s is not None:
            self._task = asyncio.create_task(
                self._watch(self._limit_s, request_id, engine, on_expiry)
            )

    def leave_running(self) -> None:
        """Makes `end` keep the clock running, for a background response."""
        self._is_background = True

    def end(self) -> None:
        """Stops the clock at the end of the request."""
        if self._task is not None and not self._is_background:
            self._task.cancel()

    async def _watch(
        self, limit_s: float, request_id: str, engine: AsyncLLM, on_expiry: Callable[[], None]
    ) -> None:
        await self._sleep(limit_s)
        if self._is_background and not _find_ids(engine, request_id):
            return  # it ended in time
        on_expiry()
        self.expired.set_result(None)
        waited = 0.0
        while waited < GRACE_S:
            if found := _find_ids(engine, request_id):
                self._aborted = True
                self._had_tokens |= _have_tokens(engine, found)
                await engine.abort(found)
            await self._sleep(_RETRY_S)
            waited += _RETRY_S
        self.cut.set_result(None)


def _find_ids(engine: AsyncLLM, request_id: str) -> list[str]:
    """Returns all of a request's ids in the engine: each choice, prompt and turn has its own."""
    return [name for name in engine.output_processor.external_req_ids if request_id in name]


def _have_tokens(engine: AsyncLLM, names: Iterable[str]) -> bool:
    processor = engine.output_processor  # maps the front end's ids to the engine's
    inner = [one for name in names for one in processor.external_req_ids[name]]
    states = [processor.request_states[one] for one in inner if one in processor.request_states]
    return any(state.detokenizer.num_output_tokens() > 0 for state in states if state.detokenizer)


def incomplete(part: bytes) -> bytes:
    """Changes the status of a response, or of its event, from "completed" to "incomplete"."""
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


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _compact(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
