# SPDX-License-Identifier: Apache-2.0
"""Rejects sampling parameters that vLLM accepts and this sampler cannot honor."""

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def validate(params: SamplingParams) -> None:
    """Raises VLLMValidationError (HTTP 400) that names the first unsupported parameter."""
    # Everything else in `SamplingParams` is honored by the sampler or handled by vLLM itself (stop
    # strings, repetition_detection, flat_logprobs, n, output_kind, ...).
    refused = {
        "thinking_token_budget": params.thinking_token_budget is not None,
        "watermarking": params.watermarking is True,
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None,
        "prompt_logprob_start": params.prompt_logprob_start is not None,
        "trace_decode_token_ids": params.trace_decode_token_ids is not None,
    }
    for name, present in refused.items():
        if present:
            raise VLLMValidationError(
                f"{name} is not supported by vllm-metal; remove it from the request's "
                "sampling parameters.",
                parameter=name,
            )
