# SPDX-License-Identifier: Apache-2.0
"""What the engine computes for each request, told to somebody in the server's process.

vLLM's statistics have sums over all requests, and of one request only what it had at its end, if it
came to one. A request that was aborted is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor


def watch(
    processor: OutputProcessor,
    begin: Callable[[str, str | None], None],
    take: Callable[[Iterable[EngineCoreOutput]], None],
    abort: Callable[[Iterable[str]], None],
) -> None:
    """Has all that goes through one engine client's output processor told to somebody.

    Args:
        processor: of the client. vLLM calls its methods through it, in the event loop.
        begin: is told of a request that enters the engine, by its id in the engine (each choice of
            a request has one), and of its `cache_salt`.
        take: is told of a step's outputs, those of requests that were aborted meanwhile among them:
            before vLLM, which cuts off tokens after a stop string.
        abort: is told of requests that the engine is to abort; more of their outputs may come.
    """
    add_request, process_outputs = processor.add_request, processor.process_outputs
    abort_requests = processor.abort_requests

    def telling_of_the_request(request: Any, *args: Any, **options: Any) -> Any:
        begin(request.request_id, request.cache_salt)
        return add_request(request, *args, **options)

    def telling_of_the_outputs(outputs: list[EngineCoreOutput], *args: Any, **options: Any) -> Any:
        take(outputs)
        processed = process_outputs(outputs, *args, **options)
        abort(processed.reqs_to_abort)  # they came to a stop string
        return processed

    def telling_of_the_end(*args: Any, **options: Any) -> list[str]:
        aborted = abort_requests(*args, **options)
        abort(aborted)
        return aborted

    setattr(processor, "add_request", telling_of_the_request)  # noqa: B010 - mypy
    setattr(processor, "process_outputs", telling_of_the_outputs)  # noqa: B010
    setattr(processor, "abort_requests", telling_of_the_end)  # noqa: B010
