# SPDX-License-Identifier: Apache-2.0
"""Turns logits into tokens: everything after the model's last layer."""

from vllm_metal.engine.sample.custom import CustomProcessors
from vllm_metal.engine.sample.draft_spans import DraftSpans, num_accepted
from vllm_metal.engine.sample.logit_chunks import rows_at_once
from vllm_metal.engine.sample.logprobs import Logprobs
from vllm_metal.engine.sample.prompt_logprobs import prompt_logprob_chunks
from vllm_metal.engine.sample.sampler import GrammarMask, Sampler, SamplerOutput
from vllm_metal.engine.sample.validate import validate

__all__ = [
    "CustomProcessors",
    "DraftSpans",
    "GrammarMask",
    "Logprobs",
    "Sampler",
    "SamplerOutput",
    "num_accepted",
    "prompt_logprob_chunks",
    "rows_at_once",
    "validate",
]
