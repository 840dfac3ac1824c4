# SPDX-License-Identifier: Apache-2.0
"""What engines tell the server, told to us too: statistics, and outputs of each request."""

# Remove when vLLM counts tokens by a label of the request, its entry point for stat loggers
# respects --disable-log-stats, and a worker may report metrics. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase


def add_stat_logger(make: Callable[[VllmConfig, list[int]], AggregateStatLoggerBase]) -> None:
    """Has every engine's statistics go to one more logger; call it once vLLM is loaded.

    vLLM's entry point for such loggers (`vllm.stat_logger_plugins`) is not used for three reasons.
    With a logger there, vLLM collects statistics though --disable-log-stats asks for none. `LLM`
    does not look there. And what such a logger registers is gone when vLLM registers its metrics.

    Args:
        make: makes the logger of an engine of its configuration, and of the engines' indices.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    def adding(
        init: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **options: Any
    ) -> None:
        init(self, vllm_config, *args, **options)
        # The first: a worker's figures come where vLLM's loggers look for a connector's.
        self.stat_loggers.insert(0, make(vllm_config, self.engine_indexes))

    replace(StatLoggerManager, "__init__", adding)


def watch(
    processor: OutputProcessor,
    begin: Callable[[str, str | None], None],
    take: Callable[[Iterable[EngineCoreOutput]], None],
    abort: Callable[[Iterable[str]], None],
) -> None:
    """Has all that goes through one engine client's output processor told to somebody.

    vLLM's statistics have sums over all requests, and of one request only what it had at its end,
    if it came to one. A request that was aborted is not among them.

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
