# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters through the real engine."""

import json

import torch
from e2e.harness import counters, engine, generate, greedy
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LogitsProcessor


def sampled(seed, **options):
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=200, seed=seed, max_tokens=24, ignore_eos=True, **options
    )


def test_a_seeded_request_is_the_same_alone_and_among_sixteen(tiny, tiny_text):
    prompts = [tiny_text[17 * i : 17 * i + 10 + 3 * i] for i in range(16)]
    others = [greedy(24) if i % 3 else sampled(None, presence_penalty=0.5) for i in range(16)]
    with engine(tiny, max_model_len=256, max_num_seqs=16) as llm:
        (alone,) = generate(llm, prompts[5:6], [sampled(42)])
        (again,) = generate(llm, prompts[5:6], [sampled(42)])
        (different,) = generate(llm, prompts[5:6], [sampled(43)])
        params = [*others[:5], sampled(42), *others[6:]]
        together = generate(llm, prompts, params)[5]
    assert alone == again == together
    assert alone != different


def test_a_seeded_request_survives_preemption(tiny, tiny_text):
    prompts = [tiny_text[31 * i : 31 * i + 100] for i in range(6)]
    params = [sampled(i, repetition_penalty=1.3) for i in range(6)]
    with engine(tiny, max_model_len=160, num_gpu_blocks_override=200) as llm:
        expected = generate(llm, prompts, params)
    with engine(tiny, max_model_len=160, num_gpu_blocks_override=24) as llm:
        assert generate(llm, prompts, params) == expected
        assert counters(llm)["vllm:num_preemptions"] > 0


def test_json_schema_bias_bad_words_and_min_tokens(short):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Paris", "Rome"]}, "people": {"enum": [1, 2]}},
        "required": ["name", "people"],
        "additionalProperties": False,
    }
    dense = {"backend": "xgrammar", "disable_any_whitespace": True}  # else two layers write that
    with engine(short, structured_outputs_config=dense) as llm:
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Capital of France as JSON, with its people?"}],
            add_generation_prompt=True,
            tokenize=False,
        )
        plain = llm.generate(prompt, greedy(8), use_tqdm=False)[0].outputs[0]
        first = plain.token_ids[0]
        # Words are banned as token sequences; the same letters may come in other tokens.
        pairs = [list(plain.token_ids[n : n + 2]) for n in range(1, 7)]
        banned = next(
            pair
            for pair in pairs
            if tokenizer.encode(tokenizer.decode(pair), add_special_tokens=False) == pair
        )
        word = tokenizer.decode(banned)
        outputs = llm.generate(
            [prompt] * 5,
            [
                SamplingParams(
                    temperature=0.8,
                    seed=1,
                    max_tokens=60,
                    structured_outputs=StructuredOutputsParams(json=schema),
                ),
                greedy(8, logit_bias={first: -100}),
                greedy(8, bad_words=[word]),
                greedy(4, allowed_token_ids=[first, 100, 101]),
                SamplingParams(temperature=0, max_tokens=40, min_tokens=40),
            ],
            use_tqdm=False,
        )
    answer, biased, without, allowed, long = (output.outputs[0] for output in outputs)
    parsed = json.loads(answer.text)
    assert set(parsed) == {"name", "people"} and parsed["name"] in ("Paris", "Rome")
    assert biased.token_ids[0] != first
    assert not contains(without.token_ids, banned)
    assert set(allowed.token_ids) <= {first, 100, 101}
    assert len(long.token_ids) == 40


def contains(token_ids, sequence):
    """Returns whether `sequence` occurs in the tokens."""
    length = len(sequence)
    return any(list(token_ids[i : i + length]) == sequence for i in range(len(token_ids)))


class Countdown(LogitsProcessor):
    """Forces token 100 + (tokens generated so far): wrong as soon as it sees a stale output."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self._outputs = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        if update is None:
            return
        for index in update.removed:
            self._outputs.pop(index, None)
        for index, _, _, output in update.added:
            self._outputs[index] = output
        for source, target, _ in update.moved:
            self._outputs[target] = self._outputs.pop(source)

    def apply(self, logits):
        forced = torch.full_like(logits, -torch.inf)
        for index, output in self._outputs.items():
            forced[index, 100 + len(output)] = 0
        return forced


def test_custom_processors_see_every_token_with_async_scheduling(tiny, tiny_text):
    prompts = [tiny_text[i : i + 5 + i] for i in range(4)]
    params = [greedy(3 + 2 * i) for i in range(4)]
    options = {"async_scheduling": True, "logits_processors": [Countdown]}
    with engine(tiny, max_model_len=256, **options) as llm:
        outputs = generate(llm, prompts, params)
    assert outputs == [[100 + step for step in range(3 + 2 * i)] for i in range(4)]
