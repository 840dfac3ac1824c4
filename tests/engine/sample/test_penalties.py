# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample import Sampler

V = 40


def test_tokens_never_fetched_still_count(distribution):
    """Greedy runs with penalties, requests joining and leaving at different steps, against a loop
    that knows every token. No token reaches the host before the end."""
    rng = np.random.default_rng(3)
    num_steps, num_reqs = 14, 5
    logits = rng.normal(scale=0.6, size=(num_steps, num_reqs, V)).astype(np.float32)
    logits[..., :6] += 1.5  # favorites, so that tokens come back and counts exceed one
    penalties = [
        {"repetition_penalty": 1.9},
        {"frequency_penalty": 1.2},
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 0.8},
        {"frequency_penalty": -0.5, "presence_penalty": 0.3},
    ]
    sampler = Sampler(V, num_reqs)
    lives: list[tuple[SamplingParams, list[int], list[tuple[int, int, mx.array]]]] = []
    holder: dict[int, int] = {}
    for step in range(num_steps):
        for req_idx in range(num_reqs):
            if step == req_idx or step == req_idx + 8:  # the second arrival reuses the req_idx
                if req_idx in holder:
                    sampler.remove_request(req_idx)
                setting = penalties[(req_idx + step) % len(penalties)]
                params = SamplingParams(temperature=0, **setting)
                prompt = rng.integers(0, V, 6).tolist()
                sampler.add_request(req_idx, params, prompt, [])
                holder[req_idx] = len(lives)
                lives.append((params, prompt, []))
        here = [req_idx for req_idx in rng.permutation(num_reqs).tolist() if req_idx in holder]
        counts = np.array([len(lives[holder[req_idx]][2]) for req_idx in here], dtype=np.int32)
        req_indices = np.array(here, dtype=np.int32)
        tokens = sampler.sample(mx.array(logits[step, req_indices]), req_indices, counts).token_ids
        for row, req_idx in enumerate(here):
            lives[holder[req_idx]][2].append((step, req_idx, tokens[row]))

    assert len(lives) > num_reqs
    changed = 0
    for params, prompt, steps in lives:
        output: list[int] = []
        for step, req_idx, token in steps:
            expected = distribution(logits[step, req_idx], params, prompt, output).argmax()
            assert token.item() == expected
            output.append(int(expected))
            changed += expected != logits[step, req_idx].argmax()
    assert changed > 5


def test_same_penalised_logits_as_vllm():
    """Compares processed_logits and all V logprobs with vLLM's torch code."""
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
    for req_idx in range(3):
        own = {name: column[req_idx] for name, column in columns.items()}
        params = SamplingParams(temperature=0, logprobs=-1, **own)
        sampler.add_request(req_idx, params, prompts[req_idx].tolist(), outputs[req_idx].tolist())
    req_indices = np.arange(3, dtype=np.int32)
    out = sampler.sample(mx.array(logits), req_indices, np.full_like(req_indices, 15))
    lists = out.logprobs.to_lists()
    got = np.zeros((3, V), np.float32)
    np.put_along_axis(got, lists.logprob_token_ids[:, 1:], lists.logprobs[:, 1:], axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
