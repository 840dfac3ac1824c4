# SPDX-License-Identifier: Apache-2.0
"""Steps that an error ends, on a fake runner."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_metal.device import errors
from vllm_metal.engine.batch.per_request_state import RequestsRefused
from vllm_metal.engine.worker import recovery
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.recovery import RecoveringRunner
from vllm_metal.engine.worker.step_hooks import StepHooks
from vllm_metal.patches.vllm_patches.step_result import StepResult


class Device:
    """Throws an error once, to the next check or wait."""

    def __init__(self, monkeypatch):
        self.error = None
        monkeypatch.setattr(errors, "check", self.ask)
        monkeypatch.setattr(errors, "wait", self.ask)

    def ask(self):
        error, self.error = self.error, None
        if error is not None:
            raise RuntimeError(error)


class Runner(ModelRunner):
    """A runner without a model; each step samples its number for each request."""

    refused = frozenset()  # requests that it cannot take in

    def __init__(self, device, graphs, made):
        super().__init__(None, None, None, 1)
        self.device, self.graphs, self.allowed = device, graphs, graphs.allowed
        self.uses_graphs = self.samples = True
        made.append(self)

    def update_requests(self, scheduler_output):
        refused = self.refused & set(scheduler_output.num_scheduled_tokens)
        if refused:
            raise RequestsRefused({req_id: ValueError("odd") for req_id in refused})

    def forward(self, scheduler_output):
        self._req_ids = list(scheduler_output.num_scheduled_tokens)
        self.graphs.num_built += self.allowed and self.uses_graphs

    def submit(self, grammar_output):
        self.device.ask()
        ids, tokens = self._req_ids, [7] * self.samples
        return SimpleNamespace(
            always_waits=False,
            checked=False,
            get_output=lambda: StepResult(
                req_ids=ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
                sampled_token_ids=[tokens for _ in ids],
            ),
        )

    def take_draft_token_ids(self):
        self.device.ask()
        return "drafts"

    def wait(self):
        pass


class Hooks(StepHooks):
    def __init__(self):
        self.told = []

    def before_pool_goes(self, lost):
        self.told.append("lost" if lost else "goes")

    def steps_computed(self, num_left):
        self.told.append(num_left)


class Engine:
    """Runs steps of given requests; returns results in order."""

    def __init__(self, monkeypatch):
        self.device, self.made, self.hooks = Device(monkeypatch), [], Hooks()
        self.runner = RecoveringRunner(
            lambda graphs: Runner(self.device, graphs, self.made), self.hooks
        )

    def step(self, *req_ids):
        output = replace(
            SchedulerOutput.make_empty(), num_scheduled_tokens=dict.fromkeys(req_ids, 1)
        )
        result = self.runner.execute_model(output)
        return self.runner.sample_tokens(None) if result is None else result


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def fails(result, *req_ids):
    """Returns whether a result reports these failed requests and a lost pool."""
    return (
        set(result.failures) == set(req_ids)
        and set(result.failures.values()) <= {"the step failed: broken"}
        and result.pool_lost
        and not any(result.sampled_token_ids)
    )


def nothing(result):
    """Returns whether a result belongs to a dropped step."""
    return not (result.failures or result.pool_lost or any(result.sampled_token_ids))


def test_an_error_met_by_the_next_step_fails_both(engine, given_back):
    first = engine.step("a", "b")
    engine.device.error = "broken"
    second = engine.step("b", "c")
    third = engine.step("d")
    assert fails(first.get_output(), "a", "b", "c")
    assert nothing(second.get_output()) and nothing(third.get_output())
    assert engine.step("d").get_output().sampled_token_ids == [[7]]
    assert engine.runner.num_failures == 1 and len(engine.made) == 2
    assert given_back == ["given back"]


def test_an_error_behind_tokens_that_could_be_read(engine):
    first, second = engine.step("a"), engine.step("b")
    engine.device.error = "broken"  # of either
    assert fails(first.get_output(), "a", "b")
    assert nothing(second.get_output())


def test_steps_that_are_known_to_be_computed_do_not_fail(engine):
    first, second = engine.step("a"), engine.step("b")
    assert first.get_output().sampled_token_ids == [[7]]
    engine.device.error = "broken"
    assert fails(second.get_output(), "b")
    assert engine.hooks.told == [1, "lost"]


def test_a_step_without_tokens_is_known_with_the_next(engine):
    engine.made[0].samples = False
    first, second = engine.step("a"), engine.step("b")
    assert nothing(first.get_output())
    engine.device.error = "broken"
    assert fails(second.get_output(), "a", "b")
    engine.made[1].samples = False
    first = engine.step("a")
    assert nothing(first.get_output())
    engine.made[1].samples = True
    assert engine.step("b").get_output().sampled_token_ids
    engine.device.error = "broken"
    assert fails(engine.step("c").get_output(), "c")


@pytest.mark.parametrize("call", ["wait", "release_pool", "take_draft_token_ids"])
def test_whoever_else_meets_the_error(engine, call):
    first = engine.step("a")
    engine.device.error = "broken"
    assert getattr(engine.runner, call)() is None
    assert engine.runner.awake == (call != "release_pool")
    engine.runner.restore_pool()
    second = engine.step("b")
    assert fails(first.get_output(), "a") and nothing(second.get_output())
    assert engine.step("b").get_output().sampled_token_ids == [[7]]
    assert engine.runner.num_failures == 1


def test_an_error_where_nothing_is_in_flight_restarts_all(engine):
    assert engine.step("a").get_output().sampled_token_ids == [[7]]
    engine.device.error = "broken"
    engine.runner.wait()
    assert fails(engine.step("a").get_output())
    assert engine.step("a").get_output().sampled_token_ids == [[7]]


def test_a_step_that_ended_before_the_pool_was_released_keeps_its_tokens(engine):
    first = engine.step("a")
    engine.runner.release_pool()
    assert engine.hooks.told == [0, "goes"]
    assert first.get_output().sampled_token_ids == [[7]]


def test_the_scheduler_hears_that_a_pool_made_after_sleep_is_empty(engine):
    """It may have kept its prefix cache and running requests."""
    engine.runner.release_pool()
    engine.runner.restore_pool()
    assert fails(engine.step("a").get_output())
    assert engine.step("a").get_output().sampled_token_ids == [[7]]


@pytest.mark.parametrize(
    ("between", "survives"),
    [(0, False), (recovery.STEPS_THAT_END_A_ROW - 1, False), (recovery.STEPS_THAT_END_A_ROW, True)],
)
def test_failures_are_in_a_row_though_some_steps_are_right_between(engine, between, survives):
    def fail():
        output = engine.step("a")
        engine.device.error = "broken"
        return output.get_output()

    for _ in range(recovery.MAX_FAILURES_IN_A_ROW):
        assert fails(fail(), "a")
        for _ in range(between):
            assert engine.step("a").get_output().sampled_token_ids == [[7]]
    if survives:
        assert fails(fail(), "a")
        return
    for _ in range(2):  # and it stays so, whoever calls
        with pytest.raises(RuntimeError, match="broken"):
            fail()
        engine.device.error = None


def test_a_failure_in_a_call_from_outside_ends_the_engine_too(engine):
    for _ in range(recovery.MAX_FAILURES_IN_A_ROW):
        engine.device.error = "broken"
        engine.runner.wait()
        engine.step("a").get_output()
    first, engine.device.error = engine.step("a"), "broken"
    with pytest.raises(RuntimeError, match="broken"):
        engine.runner.wait()
    for call in (first.get_output, lambda: engine.step("a")):
        with pytest.raises(RuntimeError, match="broken"):
            call()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_runner_has_no_graphs_where_one_may_have_failed(engine, ahead):
    engine.made[0].uses_graphs = False
    assert fails_once(engine, ahead)
    assert engine.made[1].allowed  # none had a part in it
    assert engine.step("a").get_output().sampled_token_ids == [[7]]
    engine.made[1].uses_graphs = False  # those of before were right
    assert fails_once(engine, ahead)
    assert engine.made[2].allowed
    assert fails_once(engine, ahead)
    assert not engine.made[3].allowed
    for _ in range(recovery.STEPS_THAT_END_A_ROW):
        assert engine.step("a").get_output().sampled_token_ids == [[7]]
    assert fails_once(engine, ahead)
    assert not engine.made[4].allowed  # for good


def fails_once(engine, ahead):
    """Returns whether a step failed, noticed by the next one or when it is read."""
    first = engine.step("a")
    engine.device.error = "broken"
    if ahead:
        engine.step("a")
    return fails(first.get_output(), "a")


def refuses(result, *req_ids):
    """Returns whether a result reports that these requests could not be added."""
    reason = "the request could not be added: ValueError: odd"
    return (
        result.failures == dict.fromkeys(req_ids, reason)
        and result.pool_lost
        and not any(result.sampled_token_ids)
    )


def test_a_request_that_cannot_be_taken_in_fails_alone(engine):
    first = engine.step("a")
    engine.made[0].refused = {"b"}
    second = engine.step("a", "b", "c")
    engine.made[1].refused = {"b", "d"}  # the next step was sent before anybody had heard
    third = engine.step("b", "d")
    assert refuses(first.get_output(), "b", "d")
    assert nothing(second.get_output()) and nothing(third.get_output())
    assert engine.step("a", "c").get_output().sampled_token_ids == [[7], [7]]
    assert engine.runner.num_failures == 1 and len(engine.made) == 2
    assert engine.hooks.told == ["lost", 0]


def test_requests_that_cannot_be_taken_in_do_not_end_the_engine(engine):
    for _ in range(2 * recovery.MAX_FAILURES_IN_A_ROW):
        engine.made[-1].refused = {"b"}
        assert refuses(engine.step("a", "b").get_output(), "b")
    assert engine.step("a").get_output().sampled_token_ids == [[7]]


def test_an_error_behind_one_that_nobody_has_heard_of_keeps_both(engine):
    engine.made[0].refused = {"b"}
    first = engine.step("b")
    engine.device.error = "broken"
    engine.runner.wait()
    assert refuses(first.get_output(), "b")
    assert engine.runner.num_failures == 2
