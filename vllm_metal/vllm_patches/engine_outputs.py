# SPDX-License-Identifier: Apache-2.0
"""What the engine computes for each request, told to somebody in the server's process.

vLLM's statistics have sums over all requests, and of one request only what it had at its end, if it
came to one. A request that was aborted is not among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor


class _Watcher(Protocol):
    """Who is told."""

    def begin(self, request_id: str, salt: str | None) -> None:
        """A request enters the engine.

        Args:
            request_id: the engine's own; each choice of a request has one.
            salt: its `cache_salt`.
        """

    def take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """A step's outputs, those of requests that were aborted meanwhile among them."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """The engine is told to abort requests; a few more of their outputs may come.

        Args:
            request_ids: the engine's own.
        """


def watch(processor: OutputProcessor, watcher: _Watcher) -> None:
    """Has all that goes through one engine client's output processor told to a watcher.

    Args:
        processor: of the client. vLLM calls its methods through it, in the event loop.
        watcher: is told first, because vLLM cuts off tokens after a stop string.
    """
    add_request, process_outputs = processor.add_request, processor.process_outputs
    abort_requests = processor.abort_requests

    def telling_of_the_request(request: Any, *args: Any, **options: Any) -> Any:
        watcher.begin(request.request_id, request.cache_salt)
        return add_request(request, *args, **options)

    def telling_of_the_outputs(outputs: list[EngineCoreOutput], *args: Any, **options: Any) -> Any:
        watcher.take(outputs)
        processed = process_outputs(outputs, *args, **options)
        watcher.abort(processed.reqs_to_abort)  # they came to a stop string
        return processed

    def telling_of_the_end(*args: Any, **options: Any) -> list[str]:
        aborted = abort_requests(*args, **options)
        watcher.abort(aborted)
        return aborted

    setattr(processor, "add_request", telling_of_the_request)  # noqa: B010 - mypy
    setattr(processor, "process_outputs", telling_of_the_outputs)  # noqa: B010
    setattr(processor, "abort_requests", telling_of_the_end)  # noqa: B010
