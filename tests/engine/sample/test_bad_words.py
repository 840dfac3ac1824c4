# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
import pytest
from vllm import SamplingParams

from vllm_metal.engine.sample import Sampler

V = 6


@pytest.mark.parametrize("seed", range(3))
def test_words_are_matched_against_tokens_never_fetched(seed, distribution):
    """A vocabulary of six tokens, so that prefixes come up all the time. The second request brings
    longer words while the first is running; the third has single tokens only."""
    rng = np.random.default_rng(seed)
    num_steps = 40
    logits = rng.normal(size=(num_steps, 3, V)).astype(np.float32)
    words = [
        [[0, 1], [2, 3], [1, 1]],
        [[0, 1, 2], [3, 3, 3, 4], [5, 0], [4]],
        [[2], [0]],
    ]
    arrival = [0, 5, 9]
    params = [SamplingParams(temperature=0, _bad_words_token_ids=w) for w in words]
    resumed = [[], [3, 3, 3], []]
    sampler = Sampler(V, 3)
    tokens = []
    for step in range(num_steps):
        if step in arrival:
            request = arrival.index(step)
            sampler.add_request(request, params[request], [], list(resumed[request]))
        req_indices = np.array([r for r in (2, 0, 1) if arrival[r] <= step], dtype=np.int32)
        counts = np.array(
            [len(resumed[r]) + step - arrival[r] for r in req_indices], dtype=np.int32
        )
        tokens.append(
            (req_indices, sampler.sample(mx.array(logits[step, req_indices]), req_indices, counts))
        )

    outputs = [list(r) for r in resumed]
    changed = 0
    for step, (req_indices, out) in enumerate(tokens):
        for request, token in zip(req_indices.tolist(), out.token_ids.tolist(), strict=True):
            row = logits[step, request]
            assert token == distribution(row, params[request], [], outputs[request]).argmax()
            changed += token != row.argmax()
            outputs[request].append(token)
    assert changed > 10
