# SPDX-License-Identifier: Apache-2.0
"""Generates one token with an in-process engine, and prints it: `python one_token.py MODEL`."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(
    model=sys.argv[1],
    skip_tokenizer_init=True,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=2,
    kv_cache_memory_bytes=1 << 24,
)
params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
(reply,) = llm.generate({"prompt_token_ids": [3, 4, 5]}, params)
print("TOKENS", *reply.outputs[0].token_ids)
