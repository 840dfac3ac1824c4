# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
import pytest
from vllm import SamplingParams

from vllm_metal.engine.sample import GrammarMask, Logprobs, Sampler

V = 50
LOGITS = np.random.default_rng(11).normal(scale=2.0, size=(3, V)).astype(np.float32)
REQ_INDICES = np.arange(3, dtype=np.int32)
ZEROS = np.zeros(3, dtype=np.int32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(got: Logprobs, scores: np.ndarray, chosen: np.ndarray, num_logprobs: int) -> None:
    """scores: [N, V], expected value of every token."""
    lists = got.to_lists()
    assert lists.logprob_token_ids.shape == lists.logprobs.shape == (len(scores), num_logprobs + 1)
    best_first = np.argsort(-scores, axis=-1)[:, :num_logprobs]
    assert (lists.logprob_token_ids[:, 0] == chosen).all()
    assert (lists.logprob_token_ids[:, 1:] == best_first).all()
    expected = np.take_along_axis(scores, lists.logprob_token_ids.astype(np.int64), axis=-1)
    np.testing.assert_allclose(lists.logprobs, expected, rtol=1e-5, atol=1e-5)
    own = np.take_along_axis(scores, chosen[:, None].astype(np.int64), axis=-1)
    assert lists.sampled_token_ranks.tolist() == (scores >= own).sum(axis=-1).tolist()


def sample(mode: str, params: list[SamplingParams], grammar: GrammarMask | None = None):
    sampler = Sampler(V, 3, logprobs_mode=mode, seed=6)
    for req_idx, own in enumerate(params):
        sampler.add_request(req_idx, own, [], [])
    return sampler.sample(mx.array(LOGITS), REQ_INDICES, ZEROS, grammar)


@pytest.mark.parametrize("num_logprobs", [0, 1, 7, V - 1, -1])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_raw_logprobs_are_those_of_the_models_logits(num_logprobs, temperature):
    biased = SamplingParams(
        temperature=temperature, logprobs=num_logprobs, logit_bias={1: 30.0}, top_k=3
    )
    out = sample("raw_logprobs", [biased] * 3)
    width = V if num_logprobs == -1 else num_logprobs
    check(out.logprobs, log_softmax(LOGITS), np.array(out.token_ids), width)


def test_width_is_the_largest_any_row_asked_for():
    asked = [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=5)]
    out = sample("raw_logprobs", asked)
    check(out.logprobs, log_softmax(LOGITS), np.array(out.token_ids), 5)
    assert sample("raw_logprobs", [SamplingParams()] * 3).logprobs is None


def test_raw_logits():
    out = sample("raw_logits", [SamplingParams(logprobs=4)] * 3)
    check(out.logprobs, LOGITS.astype(np.float64), np.array(out.token_ids), 4)


def test_processed_logprobs_are_of_the_distribution_drawn_from(distribution):
    params = [
        SamplingParams(temperature=0.6, top_k=8, logprobs=8),
        SamplingParams(temperature=0, logit_bias={2: 3.0}, logprobs=8),
        SamplingParams(top_p=0.9, min_p=0.01, logprobs=8),
    ]
    out = sample("processed_logprobs", params)
    lists = out.logprobs.to_lists()
    for row in (0, 2):
        expected = distribution(LOGITS[row], params[row])
        got = np.exp(lists.logprobs[row])
        np.testing.assert_allclose(got, expected[lists.logprob_token_ids[row]], atol=1e-5)
    greedy = LOGITS[1].copy()
    greedy[2] += 3.0
    best = np.argsort(-greedy)[:8]
    assert lists.logprob_token_ids[1].tolist() == [best[0], *best]
    np.testing.assert_allclose(lists.logprobs[1, 1:], log_softmax(greedy)[best], atol=1e-5)


def test_raw_logprobs_reflect_the_grammar():
    mask = GrammarMask(np.array([1], dtype=np.int32), np.array([[0b1100, 0]], dtype=np.int32))
    out = sample("raw_logprobs", [SamplingParams(temperature=0, logprobs=2)] * 3, mask)
    masked = LOGITS.copy()
    masked[1, [v for v in range(V) if v not in (2, 3)]] = -np.inf
    check(out.logprobs, log_softmax(masked), np.array(out.token_ids), 2)


def test_logprob_token_ids_are_reported_in_the_order_given():
    params = [
        SamplingParams(logprob_token_ids=[40, 3, 7], temperature=0),
        SamplingParams(logprobs=4, temperature=0),
        SamplingParams(logprob_token_ids=[9], temperature=0),
    ]
    lists = sample("raw_logprobs", params).logprobs.to_lists()
    expected = log_softmax(LOGITS)
    assert lists.logprob_token_ids[0, 1:4].tolist() == [40, 3, 7]
    np.testing.assert_allclose(lists.logprobs[0, 1:4], expected[0, [40, 3, 7]], atol=1e-5)
    assert lists.logprobs[0, 4] == -np.inf
    best = np.argsort(-LOGITS[1])[:4]
    assert lists.logprob_token_ids[1, 1:].tolist() == best.tolist()
    np.testing.assert_allclose(lists.logprobs[1, 1:], expected[1, best], atol=1e-5)
    np.testing.assert_allclose(lists.logprobs[2, 1], expected[2, 9], atol=1e-5)
    assert (lists.logprobs[2, 2:] == -np.inf).all()
