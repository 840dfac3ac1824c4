# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.sample import Sampler

V = 40


def test_tokens_never_fetched_still_count(distribution):
    """Greedy runs with penalties, requests joining and leaving at different steps, against a loop
    that knows every token. No token reaches the host before the end."""
    rng = np.random.default_rng(3)
    num_steps, num_slots = 14, 5
    logits = rng.normal(scale=0.6, size=(num_steps, num_slots, V)).astype(np.float32)
    logits[..., :6] += 1.5  # favourites, so that tokens come back and counts exceed one
    penalties = [
        {"repetition_penalty": 1.9},
        {"frequency_penalty": 1.2},
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 0.8},
        {"frequency_penalty": -0.5, "presence_penalty": 0.3},
    ]
    sampler = Sampler(V, num_slots)
    lives: list[tuple[SamplingParams, list[int], list[tuple[int, int, mx.array]]]] = []
    holder: dict[int, int] = {}
    for step in range(num_steps):
        for slot in range(num_slots):
            if step == slot or step == slot + 8:  # the second arrival reuses the slot
                if slot in holder:
                    sampler.remove(slot)
                setting = penalties[(slot + step) % len(penalties)]
                params = SamplingParams(temperature=0, **setting)
                prompt = rng.integers(0, V, 6).tolist()
                sampler.add(slot, params, prompt, [])
                holder[slot] = len(lives)
                lives.append((params, prompt, []))
        here = [slot for slot in rng.permutation(num_slots).tolist() if slot in holder]
        counts = np.array([len(lives[holder[slot]][2]) for slot in here], dtype=np.int32)
        slots = np.array(here, dtype=np.int32)
        tokens = sampler.sample(mx.array(logits[step, slots]), slots, counts).token_ids
        for row, slot in enumerate(here):
            lives[holder[slot]][2].append((step, slot, tokens[row]))

    assert len(lives) > num_slots
    changed = 0
    for params, prompt, steps in lives:
        output: list[int] = []
        for step, slot, token in steps:
            expected = distribution(logits[step, slot], params, prompt, output).argmax()
            assert token.item() == expected
            output.append(int(expected))
            changed += expected != logits[step, slot].argmax()
    assert changed > 5


def test_same_penalised_logits_as_vllm():
    """Against vLLM's torch code, through processed_logits and all V logprobs."""
    import torch
    from vllm.model_executor.layers.utils import apply_penalties

    rng = np.random.default_rng(4)
    logits = rng.normal(scale=2.0, size=(3, V)).astype(np.float32)
    prompts, outputs = rng.integers(0, V, (3, 9)), rng.integers(0, V, (3, 15))
    columns = {
        "presence_penalty": [0.5, 0.0, -1.0],
        "frequency_penalty": [0.0, 0.7, 1.5],
        "repetition_penalty": [1.3, 1.0, 0.6],
    }
    expected = apply_penalties(
        torch.from_numpy(logits.copy()),
        torch.from_numpy(prompts),
        torch.from_numpy(outputs),
        *(torch.tensor(column) for column in columns.values()),
    ).numpy()

    sampler = Sampler(V, 3, logprobs_mode="processed_logits")
    for slot in range(3):
        own = {name: column[slot] for name, column in columns.items()}
        params = SamplingParams(temperature=0, logprobs=-1, **own)
        sampler.add(slot, params, prompts[slot].tolist(), outputs[slot].tolist())
    slots = np.arange(3, dtype=np.int32)
    out = sampler.sample(mx.array(logits), slots, np.full_like(slots, 15))
    lists = out.logprobs.to_lists()
    got = np.zeros((3, V), np.float32)
    np.put_along_axis(got, lists.logprob_token_ids[:, 1:], lists.logprobs[:, 1:], axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
