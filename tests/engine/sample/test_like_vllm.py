# SPDX-License-Identifier: Apache-2.0
"""Random mixes of parameters, against vLLM's own torch sampler."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler as VllmSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_metal.engine.sample import Sampler

NUM_MIXES, NUM_REQS, V, MAX_LEN = 150, 6, 211, 128
CPU = torch.device("cpu")
#: Log of the least probability that float32 has a number for. Where any request of a batch has a
#: top_p, vLLM also drops tokens below it of those without.
NO_NUMBER = np.log(np.finfo(np.float32).smallest_subnormal) + 1


def tokens(rng, most, least=0):
    return rng.integers(0, V, int(rng.integers(least, most + 1))).tolist()


def drawn(rng):
    """Draws a request's parameters, each with a probability of about one third."""
    offered = {
        "temperature": lambda: float(rng.choice([0.0, 0.0, 0.2, 0.7, 1.3, 2.0])),
        "top_k": lambda: int(rng.integers(1, V + 1)),
        "top_p": lambda: float(rng.uniform(0.05, 1)),
        "min_p": lambda: float(rng.uniform(0, 0.5)),
        "presence_penalty": lambda: float(rng.uniform(-2, 2)),
        "frequency_penalty": lambda: float(rng.uniform(-2, 2)),
        "repetition_penalty": lambda: float(rng.uniform(0.3, 2)),
        "logit_bias": lambda: {t: float(rng.uniform(-9, 9)) for t in tokens(rng, 4, 1)},
        "allowed_token_ids": lambda: sorted({*tokens(rng, 90, 15)}),  # more than others forbid
        "_bad_words_token_ids": lambda: [tokens(rng, 2, 1) for _ in range(4)],
        "min_tokens": lambda: int(rng.integers(1, 40)),
        "stop_token_ids": lambda: tokens(rng, 3, 1),
    }
    return {name: draw() for name, draw in offered.items() if rng.random() < 0.35}


def by_token(token_ids, logprobs):
    """Reorders [N, 1 + V] tokens and logprobs, sampled one first, to [N, V] by token."""
    scores = np.full((len(token_ids), V), np.nan, np.float32)
    np.put_along_axis(scores, token_ids[:, 1:].astype(np.int64), logprobs[:, 1:], axis=1)
    return scores


def by_vllm(logits, requests, mode):
    """Returns vLLM's tokens [N], and its logprobs of all tokens [N, V]."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_REQS), speculative_config=None
    )
    processors = build_logitsprocs(config, CPU, False, False)
    batch = InputBatch(NUM_REQS, MAX_LEN, MAX_LEN, CPU, V, [16], [8], processors)
    for req_idx, (params, prompt, output) in enumerate(requests):
        state = CachedRequestState(
            str(req_idx), prompt, [], params, None, ([],), 0, output_token_ids=list(output)
        )
        batch.add_request(state)
    batch.refresh_metadata()
    done = VllmSampler(logprobs_mode=mode)(torch.from_numpy(logits.copy()), batch.sampling_metadata)
    reported = done.logprobs_tensors
    scores = by_token(reported.logprob_token_ids.numpy(), reported.logprobs.numpy())
    return done.sampled_token_ids[:, 0].numpy(), scores


def by_us(logits, requests, mode):
    sampler = Sampler(V, NUM_REQS, logprobs_mode=mode)
    for req_idx, (params, prompt, output) in enumerate(requests):
        sampler.add_request(req_idx, params, prompt, list(output))
    indices = np.arange(NUM_REQS, dtype=np.int32)
    counts = np.array([len(output) for *_, output in requests], np.int32)
    done = sampler.sample(mx.array(logits), indices, counts)
    lists = done.logprobs.to_lists()
    return np.array(done.token_ids), by_token(lists.logprob_token_ids, lists.logprobs)


@pytest.mark.parametrize("seed", range(NUM_MIXES))
def test_a_mix_of_parameters(seed):
    rng = np.random.default_rng(seed)
    mode = "raw_logprobs" if seed % 5 == 0 else "processed_logprobs"
    logits = rng.normal(scale=rng.choice([0.5, 2, 6]), size=(NUM_REQS, V)).astype(np.float32)
    params = [SamplingParams(max_tokens=64, logprobs=-1, **drawn(rng)) for _ in range(NUM_REQS)]
    requests = [(each, tokens(rng, 30, 1), tokens(rng, 30)) for each in params]
    expected_tokens, expected = by_vllm(logits, requests, mode)
    got_tokens, got = by_us(logits, requests, mode)
    if mode.startswith("processed"):
        got, expected = (np.where(each < NO_NUMBER, -np.inf, each) for each in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    if mode.startswith("processed"):  # each draws from what is left
        assert np.isfinite(np.take_along_axis(expected, got_tokens[:, None], 1)).all()
    greedy = [each.temperature == 0 for each in params]
    assert (got_tokens == expected_tokens)[greedy].all()
