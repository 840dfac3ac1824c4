# SPDX-License-Identifier: Apache-2.0
"""Passes on what engines send to the server: statistics, and the outputs of each request."""

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
    """Sends every engine's statistics to one more logger; call it once vLLM is loaded.

    Args:
        make: makes the logger from an engine's configuration and the engines' indices.
    """
    # Not vLLM's entry point (`vllm.stat_logger_plugins`): with a logger there, vLLM collects
    # statistics in spite of --disable-log-stats, `LLM` ignores it, and vLLM later unregisters
    # what such a logger has registered.
    from vllm.v1.metrics.loggers import StatLoggerManager

    def adding(
        init: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **options: Any
    ) -> None:
        init(self, vllm_config, *args, **options)
        # First: a worker's metrics arrive where vLLM's loggers expect only a connector's.
        self.stat_loggers.insert(0, make(vllm_config, self.engine_indexes))

    replace(StatLoggerManager, "__init__", adding)


def watch(
    processor: OutputProcessor,
    begin: Callable[[str, str | None], None],
    take: Callable[[Iterable[EngineCoreOutput]], None],
    abort: Callable[[Iterable[str]], None],
) -> None:
    """Calls these functions for everything that goes through a client's output processor.

    Args:
        processor: the client's output processor; vLLM calls its methods in the event loop.
        begin: takes a request's id in the engine (one per choice) and its `cache_salt`.
        take: takes a step's outputs, including those of aborted requests, before vLLM cuts off
            tokens after a stop string.
        abort: takes ids that the engine is to abort; more of their outputs may come.
    """
    # vLLM's statistics are sums over all requests. For a single request they have only its state
    # at its end, and nothing if it was aborted.
    add_request, process_outputs = processor.add_request, processor.process_outputs
    abort_requests = processor.abort_requests

    def adding(request: Any, *args: Any, **options: Any) -> Any:
        begin(request.request_id, request.cache_salt)
        return add_request(request, *args, **options)

    def processing(outputs: list[EngineCoreOutput], *args: Any, **options: Any) -> Any:
        take(outputs)
        processed = process_outputs(outputs, *args, **options)
        abort(processed.reqs_to_abort)  # they reached a stop string
        return processed

    def aborting(*args: Any, **options: Any) -> list[str]:
        aborted = abort_requests(*args, **options)
        abort(aborted)
        return aborted

    setattr(processor, "add_request", adding)  # noqa: B010 - mypy
    setattr(processor, "process_outputs", processing)  # noqa: B010
    setattr(processor, "abort_requests", aborting)  # noqa: B010
