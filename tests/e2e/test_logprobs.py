# SPDX-License-Identifier: Apache-2.0
"""Logprobs equal transformers' own, computed from the same float32 weights."""

import numpy as np
import pytest
import torch
from e2e.harness import counters, engine, greedy, text_tokens
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

TOLERANCE = 1e-3


def reference_of(path, normalize=True):
    """Makes transformers' forward of a model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def logprobs(tokens):
        """Returns [len(tokens), V] for the token after each."""
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
            return (torch.log_softmax(logits, -1) if normalize else logits).numpy()

    return logprobs


def agree(entries, row, count):
    """Asserts that a position's logprobs are right and include the best `count`."""
    for token, entry in entries.items():
        assert abs(entry.logprob - row[token]) < TOLERANCE
    ranked = sorted(entries.values(), key=lambda entry: entry.rank)[:count]
    best = np.sort(row)[::-1][:count]
    np.testing.assert_allclose([entry.logprob for entry in ranked], best, atol=TOLERANCE)


def test_sample_and_prompt_logprobs(short):
    tokens, reference = text_tokens(short), reference_of(short)
    prompts = [tokens[:5], tokens[40:190]]  # the second comes in chunks
    with engine(short, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            greedy(6, logprobs=3, prompt_logprobs=2),
            use_tqdm=False,
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        rows = reference([*prompt, *generated])
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            assert prompt[position + 1] in entries
            agree(entries, rows[position], 2)
        assert len(output.outputs[0].logprobs) == 6
        for step, entries in enumerate(output.outputs[0].logprobs):
            assert generated[step] in entries
            agree(entries, rows[len(prompt) - 1 + step], 3)


@pytest.mark.parametrize(
    "mode",
    [
        "raw_logits",
        *(
            pytest.param(mode, marks=pytest.mark.more)
            for mode in ("processed_logits", "processed_logprobs")
        ),
    ],
)
def test_a_prompt_has_what_logprobs_mode_says(tiny, tiny_text, mode):
    """vLLM's runner takes the logits themselves in both modes of logits, and processes no prompt
    token: the request's temperature and penalty change what is reported of its output alone."""
    rows = reference_of(tiny, normalize=mode.endswith("logprobs"))(tiny_text[:50])
    params = SamplingParams(
        max_tokens=2, prompt_logprobs=2, logprobs=1, presence_penalty=1.5, temperature=2.0
    )
    with engine(tiny, logprobs_mode=mode, max_model_len=64, max_num_batched_tokens=32) as llm:
        (output,) = llm.generate([{"prompt_token_ids": tiny_text[:50]}], params, use_tqdm=False)
    assert len(output.prompt_logprobs) == 50
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        agree(entries, rows[position], 2)


def test_none_and_all(tiny, tiny_text):
    prompt = tiny_text[:20]
    with engine(tiny, max_model_len=64, max_logprobs=-1) as llm:
        only, every = llm.generate(
            [{"prompt_token_ids": prompt}] * 2,
            [greedy(2, logprobs=0), greedy(2, logprobs=-1)],
            use_tqdm=False,
        )
    row = reference_of(tiny)(prompt)[-1]
    first = only.outputs[0].logprobs[0]
    assert list(first) == [only.outputs[0].token_ids[0]]
    everything = every.outputs[0].logprobs[0]
    assert len(everything) == len(row)
    agree(everything, row, 10)


def test_prompt_logprobs_come_once_though_the_request_is_preempted(tiny, tiny_text):
    reference = reference_of(tiny)
    prompts = [tiny_text[31 * i : 31 * i + 100] for i in range(6)]
    with engine(tiny, max_model_len=160, num_gpu_blocks_override=24) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            greedy(40, prompt_logprobs=1),
            use_tqdm=False,
        )
        assert counters(llm)["vllm:num_preemptions"] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = reference(prompt)
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entries in enumerate(output.prompt_logprobs[1:]):
            agree(entries, rows[position], 1)
