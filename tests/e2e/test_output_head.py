# SPDX-License-Identifier: Apache-2.0
"""vLLM requests no samples from an output head that does not need them."""

import pytest
from e2e.harness import Dense, engine, generate, greedy

from vllm_metal.engine.worker import served_model
from vllm_metal.engine.worker.sampling_head import SamplingHead

NUM_TOKENS = 6


class AtOnce(SamplingHead):
    at_once = True


@pytest.mark.parametrize("end", [AtOnce, SamplingHead])
def test_a_step_that_ends_at_once_is_one_call(tiny, tiny_text, monkeypatch, end):
    monkeypatch.setattr(served_model, "SamplingHead", end)
    prompts, asked = [tiny_text[:80], tiny_text[5:30]], []
    with engine(
        tiny, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4, async_scheduling=False
    ) as llm:
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        sample = executor.sample_tokens
        monkeypatch.setattr(
            executor,
            "sample_tokens",
            lambda *given, **options: asked.append(1) or sample(*given, **options),
        )
        outputs = generate(llm, prompts, greedy(NUM_TOKENS))
    for prompt, output in zip(prompts, outputs, strict=True):
        Dense(tiny).check(prompt, output)
        assert len(output) == NUM_TOKENS
    assert bool(asked) == (end is SamplingHead)
