# SPDX-License-Identifier: Apache-2.0
"""A request's cache_salt, on its way to the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def send_salts(remember: Callable[[SamplingParams, str | None], None]) -> None:
    """Has each request's cache_salt noted in the sampling parameters that go to the worker.

    vLLM's scheduler keeps the salt for the hashes of blocks and sends none to the worker, which
    keeps apart by it what requests draft from. The parameters are vLLM's copy for this request: the
    caller's own, which may serve other requests and be printed, stay as they are.

    Args:
        remember: notes a salt in parameters, and removes any that a client put there.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    def noting(process: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
        def process_inputs(self: InputProcessor, *args: Any, **options: Any) -> EngineCoreRequest:
            request = process(self, *args, **options)
            if request.sampling_params is not None:
                remember(request.sampling_params, request.cache_salt)
            return request

        return process_inputs

    replace(InputProcessor, "process_inputs", noting)
