# SPDX-License-Identifier: Apache-2.0
"""Ends requests that take longer than the server allows.

The engine is told to abort them, by the id that the server gave them. vLLM then sends what there is
of the answer, with the finish reason "abort" and the usage, and frees the blocks. "length" would
say that the client's own limit was reached, and an error would throw the text away. vLLM calls a
response of the Responses API "completed" all the same: `incomplete` corrects that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Sleep = Callable[[float], Awaitable[None]]
#: A request can be on its way to the engine when its time is up, so it is asked again so often.
_AGAIN_S = 0.25
#: What an aborted request may take to send its end, before it is cut off.
GRACE_S = 5.0
_COMPLETED = b"event: response.completed\n"
_DATA = b"data: "
_STATUS = {"status": "incomplete", "incomplete_details": {"reason": "timeout"}}


class Deadline:
    """The time limit of one request."""

    def __init__(self, limit_s: float | None, sleep: Sleep = asyncio.sleep) -> None:
        """Not running yet; of the running event loop.

        Args:
            limit_s: seconds; None: any time.
            sleep: waits for seconds.
        """
        self._limit_s, self._sleep = limit_s, sleep
        self._task: asyncio.Task[None] | None = None
        self._goes_on = False
        self._aborted = self._had_tokens = False
        loop = asyncio.get_running_loop()
        #: Done when the time is up, and the engine was told.
        self.expired: asyncio.Future[None] = loop.create_future()
        #: Done when the request did not end though it was aborted: whoever carries it lets go.
        self.cut: asyncio.Future[None] = loop.create_future()

    @property
    def limited(self) -> bool:
        """Whether the time can be up at all."""
        return self._limit_s is not None

    @property
    def came_to_nothing(self) -> bool:
        """Whether the request was aborted before the engine had a token of its answer."""
        return self._aborted and not self._had_tokens

    def start(self, request_id: str, engine: AsyncLLM, on_expiry: Callable[[], None]) -> None:
        """Begins to count.

        Args:
            request_id: of the server's making; every id of the request in the engine has it in it.
            engine: that is told to abort the request.
            on_expiry: called when the time is up.
        """
        if self._limit_s is not None:
            self._task = asyncio.create_task(
                self._watch(self._limit_s, request_id, engine, on_expiry)
            )

    def leave_running(self) -> None:
        """The client has its answer, and the engine goes on: a response in the background."""
        self._goes_on = True

    def end(self) -> None:
        """The request has ended; nothing more is to be done."""
        if self._task is not None and not self._goes_on:
            self._task.cancel()

    async def _watch(
        self, limit_s: float, request_id: str, engine: AsyncLLM, on_expiry: Callable[[], None]
    ) -> None:
        await self._sleep(limit_s)
        if self._goes_on and not _ids(engine, request_id):
            return  # it ended in time
        on_expiry()
        self.expired.set_result(None)
        waited = 0.0
        while waited < GRACE_S:
            if found := _ids(engine, request_id):
                self._aborted = True
                self._had_tokens |= _have_tokens(engine, found)
                await engine.abort(found)
            await self._sleep(_AGAIN_S)
            waited += _AGAIN_S
        self.cut.set_result(None)


def _ids(engine: AsyncLLM, request_id: str) -> list[str]:
    """All that the engine has of a request: choices, prompts and turns have ids of their own."""
    return [name for name in engine.output_processor.external_req_ids if request_id in name]


def _have_tokens(engine: AsyncLLM, names: Iterable[str]) -> bool:
    """Whether one of these requests has a token of its answer."""
    processor = engine.output_processor  # it has the engine's own ids by those of the front end
    inner = [one for name in names for one in processor.external_req_ids[name]]
    states = [processor.request_states[one] for one in inner if one in processor.request_states]
    return any(state.detokenizer.num_output_tokens() > 0 for state in states if state.detokenizer)


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


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _compact(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
