# SPDX-License-Identifier: Apache-2.0
"""Prompt logprobs of a step's rows, with logits as hidden states."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from engine.batch.test_requests import new_request
from vllm import SamplingParams

from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.sample import Sampler
from vllm_metal.engine.worker.sampling_head import SamplingHead

VOCAB, CHUNK = 40, 16
MODEL = SimpleNamespace(compute_logits=lambda hidden: hidden[:, 0])


def wanting(num_tokens, wanted=0):
    data = new_request("wants", list(range(num_tokens)), ([2, 4, 6],))
    data.sampling_params = SamplingParams(prompt_logprobs=wanted)
    return data


class Steps:
    """A request's prompt in chunks, through a SamplingHead."""

    def __init__(self, data):
        self.requests = Requests(2, 64, BlockTables(1, 2, 5))
        self.end = SamplingHead(MODEL, self.requests, Sampler(VOCAB, 2))
        self.end.enter(self.requests.add_request(data))
        self.logits_np = np.random.default_rng(1).normal(size=(64, VOCAB)).astype(np.float32)

    def chunk(self, start, stop):
        """Returns the logprobs of the chunk's step by request id."""
        state = self.requests["wants"]
        self.requests.num_computed_tokens_np[state.req_idx] = start
        batch = prepare(self.requests, {"wants": stop - start}, mx.zeros(2, mx.int32))
        self.end.begin(batch, mx.array(self.logits_np[start:stop, None]))
        output, arrays = self.end.finish(None)
        mx.eval(arrays)
        known = self.requests.num_known_np[state.req_idx]
        assert (output.sampled is not None) == (stop == known)
        return output.prompt_logprobs


@pytest.mark.parametrize("num_tokens", [33, 20])  # the last chunk may be the last token alone
def test_prompt_logprobs_are_complete_when_the_request_samples(num_tokens):
    steps, found = Steps(wanting(num_tokens)), []
    for start in range(0, num_tokens, CHUNK):
        found.append(steps.chunk(start, min(start + CHUNK, num_tokens)))
    assert found[:-1] == [{}] * (len(found) - 1)
    parts = [part.to_lists() for part in found[-1]["wants"]]
    logits = steps.logits_np[: num_tokens - 1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    own = np.concatenate([part.logprobs[:, 0] for part in parts])
    targets = np.arange(1, num_tokens)
    np.testing.assert_allclose(own, expected[targets - 1, targets], atol=1e-5)
    ids = np.concatenate([part.logprob_token_ids[:, 0] for part in parts])
    assert ids.tolist() == targets.tolist()


def test_a_prompt_of_one_token_has_none():
    assert Steps(wanting(1)).chunk(0, 1) == {}


def test_they_are_computed_again_until_the_scheduler_has_a_token():
    for tokens, again in (([0, 1, 2], True), ([0, 1, 2, 7], False)):
        steps = Steps(wanting(3))
        state = steps.requests.preempt_request("wants")
        steps.end.leave(state.req_idx)
        steps.end.enter(steps.requests.resume_request("wants", tokens, ([3],), 0))
        assert bool(steps.chunk(0, len(tokens))) == again
