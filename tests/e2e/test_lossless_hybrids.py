# SPDX-License-Identifier: Apache-2.0
"""Speculation keeps the distribution of sampled text in models with recurrent layers.

As tests/e2e/test_lossless_sampling.py has it. A state that keeps a trace of a rejected draft would
change the law of every token after it.
"""

import numpy as np
import pytest
from e2e.harness import Dense, counters, engine
from e2e.test_lossless_sampling import (
    AT_ONCE,
    BLOCK,
    EXACTLY,
    LENGTH,
    VOCAB,
    counts_of,
    law_of,
    p_values,
    settings,
)
from engine.spec_decode.hybrids import write_hybrid
from vllm import SamplingParams

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

NUM_CONTINUATIONS = 50_000
SAMPLED = SamplingParams(n=AT_ONCE, temperature=0.7, **EXACTLY)
GREEDY = SamplingParams(temperature=0, **EXACTLY)


def test_mtp_drafts_of_a_hybrid_leave_the_targets_law(tmp_path):
    folder = str(write_hybrid(tmp_path / "target", "qwen3_next", vocab_size=VOCAB))
    dense = Dense(folder)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 2 * BLOCK + 1).tolist()
    rows = np.stack(
        [dense.logits([*prompt, *first])[-LENGTH:] for first in np.ndindex(VOCAB, VOCAB)]
    ).reshape(VOCAB, VOCAB, LENGTH, VOCAB)
    num_requests = NUM_CONTINUATIONS // AT_ONCE
    shorter = [prompt[: BLOCK + 1 + index % BLOCK] for index in range(num_requests)]
    with engine(folder, **settings({"method": "mtp"})) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": text} for short in shorter for text in (prompt, short)],
            [SAMPLED, GREEDY] * num_requests,
            use_tqdm=False,
        )
        seen = counters(llm)
    counts = counts_of(outputs[::2])
    assert counts.sum() == NUM_CONTINUATIONS
    found = p_values(counts, law_of(SAMPLED, prompt, rows))
    print(found)
    assert min(found.values()) > 1e-4, found
    for short, output in zip(shorter, outputs[1::2], strict=True):
        dense.check(short, list(output.outputs[0].token_ids))
    accepted = seen["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < seen["vllm:spec_decode_num_draft_tokens"]
    assert seen["vllm:prefix_cache_hits"] > 0
