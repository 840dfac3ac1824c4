# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's front ends report an engine's failure of a pooling request to the client."""

# Remove when vLLM reports pooling requests that failed in the engine. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessorOutput


def report_pooling_failures() -> None:
    """Turns an engine's failure of a pooling request into an error of that request."""
    # vLLM handles one such failure, of images. Any other has no result, and vLLM takes a request
    # without one for a generating request: the front end ends, and all requests with it.
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    replace(OutputProcessor, "process_outputs", _with_empty_results)
    replace(RequestState, "make_request_output", _with_error)


def _with_empty_results(
    process: Callable[..., OutputProcessorOutput],
    self: Any,
    outputs: list[EngineCoreOutput],
    *args: Any,
    **options: Any,
) -> OutputProcessorOutput:
    from vllm.v1.engine import FinishReason

    for output in outputs:
        if output.finish_reason is not FinishReason.ERROR or output.pooling_output is not None:
            continue
        state = self.request_states.get(output.request_id)
        if state is not None and state.detokenizer is None:
            output.pooling_output = torch.empty(0)
    return process(self, outputs, *args, **options)


def _with_error(
    make: Callable[..., RequestOutput | PoolingRequestOutput | None],
    self: Any,
    new_token_ids: list[int],
    pooling_output: torch.Tensor | None,
    finish_reason: Any,
    stop_reason: Any,
    *args: Any,
    **options: Any,
) -> RequestOutput | PoolingRequestOutput | None:
    from vllm.outputs import RequestError
    from vllm.v1.engine import FinishReason

    failed = pooling_output is not None and finish_reason is FinishReason.ERROR
    if failed and options.get("error") is None:
        options["error"] = RequestError("engine_failure", str(stop_reason or "the request failed"))
    given = new_token_ids, pooling_output, finish_reason, stop_reason
    return make(self, *given, *args, **options)
