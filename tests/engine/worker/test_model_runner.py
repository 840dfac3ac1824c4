# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a step: other output heads, module inputs, metrics."""

import mlx.core as mx
import numpy as np
from engine.attention.test_forward_inputs import Gained
from engine.batch.test_requests import new_request, word
from engine.models.test_executor import BLOCK, COMMON, build, executor
from mlx_lm.models.cache import make_prompt_cache
from vllm.v1.core.sched.output import CachedRequestData

from vllm_metal.engine.batch.output_head import OutputHead
from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.sample import Sampler
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.results import Step
from vllm_metal.engine.worker.warm_up_steps import Room, run_warm_up
from vllm_metal.metrics.step_metrics import STEP, measure
from vllm_metal.patches.vllm_patches.step_result import has_results

VOCAB, MOST = COMMON["vocab_size"], 4
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()


class States(OutputHead):
    """Returns the last hidden states of prompts; records the number of rows."""

    at_once = True

    def __init__(self, requests):
        self.requests, self.inside = requests, []

    def enter(self, state):
        self.inside.append(state.req_idx)

    def leave(self, req_idx):
        if req_idx in self.inside:
            self.inside.remove(req_idx)

    def begin(self, batch, hidden_states):
        measure("a_figure", len(hidden_states))
        self.begun = batch, batch.of_logits(hidden_states)[:, 0]

    def finish(self, grammar_output):
        batch, self.states = self.begun
        return StepOutput(batch, None, {}, self.requests), [self.states]


class Gains(PerRequestState):
    """Provides one number per request."""

    def __init__(self):
        self.by_req_idx = np.ones(MOST, np.float32)

    def enter(self, state):
        self.by_req_idx[state.req_idx] = 0.5

    def leave(self, req_idx):
        self.by_req_idx[req_idx] = 1

    def extras(self, rows):
        counts = np.diff(rows.query_start_loc_np)
        return {"gain": mx.array(np.repeat(self.by_req_idx[rows.req_indices_np], counts))}


def make(columns=(), place=None):
    model = build("llama")
    run = executor(model, "llama", 20)
    if place is not None:
        setattr(model.model.layers[1], place, Gained(getattr(model.model.layers[1], place)))
    requests = Requests(MOST, 64, BlockTables(1, MOST, 5))
    end = States(requests)
    return ModelRunner(run, requests, end, MOST, columns=columns), end, model


def computed(runner, **told):
    step = Step(word(**told), pool=0)
    runner.execute(step)
    return runner.finish(step, None)


def read(runner):
    """Returns the outputs of PROMPT in two chunks."""
    new = new_request("a", PROMPT, ([2, 4, 6],))
    going_on = CachedRequestData(
        req_ids=["a"],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None],
        num_computed_tokens=[30],
        num_output_tokens=[0],
    )
    yield computed(runner, scheduled_new_reqs=[new], num_scheduled_tokens={"a": 30})
    yield computed(runner, scheduled_cached_reqs=going_on, num_scheduled_tokens={"a": 10})


def test_an_end_gets_the_last_hidden_state_of_a_prompt_that_comes_in_chunks():
    runner, end, model = make()
    assert runner.ends_at_once
    shapes = []
    for output in read(runner):
        result = output.get_output()
        assert result.sampled_token_ids == [[]] and not has_results(result)
        shapes.append(end.states.shape)
    assert shapes == [(0, COMMON["hidden_size"]), (1, COMMON["hidden_size"])]
    expected = model.model(mx.array([PROMPT]), cache=make_prompt_cache(model))[0, -1:]
    np.testing.assert_allclose(np.array(end.states), np.array(expected), atol=2e-4, rtol=2e-4)
    assert end.inside == [0]
    runner.update_requests(word(finished_req_ids={"a"}))
    assert end.inside == []


def test_what_is_measured_while_a_step_is_built_comes_with_its_results_alone():
    measure("a_figure", 1000)  # of nobody's step
    found = [output.get_output().metrics for output in read(make()[0])]
    assert found == [{STEP: {"a_figure": 30}}, {STEP: {"a_figure": 10}}]


def test_a_modules_values_are_there_in_the_warm_up_too():
    column = Gains()
    runner, _, model = make([column], "mlp")
    room = Room(1, BLOCK, 20, 64)
    told = run_warm_up(runner, Sampler(VOCAB, MOST), {"temperature": 0}, VOCAB, room)
    tokens = mx.array([told.token_ids])
    model.model.layers[1].mlp.given = mx.full(tokens.shape, 0.5)
    logits = model(tokens, cache=make_prompt_cache(model))[0, :-1]
    chosen = mx.take_along_axis(logits, tokens[0, 1:, None], axis=-1)[:, 0]
    expected = np.array(chosen - mx.logsumexp(logits, axis=-1))
    np.testing.assert_allclose(told.logprobs, expected, atol=2e-4)
    assert column.by_req_idx.tolist() == [1] * MOST  # the warm-up's request has left
