# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: everything between the model's last layer and the sampled token ids."""

from vllm_metal.sample.custom import CustomProcessors
from vllm_metal.sample.draft_spans import DraftSpans, num_accepted
from vllm_metal.sample.logit_chunks import rows_at_once
from vllm_metal.sample.logprobs import Logprobs
from vllm_metal.sample.prompt_logprobs import prompt_logprob_chunks
from vllm_metal.sample.sampler import GrammarMask, Sampler, SamplerOutput
from vllm_metal.sample.validate import validate

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
