# SPDX-License-Identifier: Apache-2.0
"""Hooks around a step: order of calls and arguments, with a fake connector."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.recovery import RecoveringRunner
from vllm_metal.engine.worker.step_hooks import StepHooks
from vllm_metal.patches.vllm_patches.step_result import StepResult


class Connector(StepHooks):
    """Records its calls, and reports one finished transfer after each step."""

    def __init__(self, calls):
        self.calls = calls

    def pool_made(self, runner):
        self.calls.append(("pool made", runner.number))

    def before_pool_goes(self, lost):
        self.calls.append("pool lost" if lost else "pool goes")

    def before_step(self, scheduler_output, pool_valid):
        self.calls.append(("before", list(scheduler_output.num_scheduled_tokens), pool_valid))

    def before_forward(self):
        self.calls.append("before forward")

    def before_submit(self):
        self.calls.append("before hand-over")

    def after_step(self, computed):
        self.calls.append("after" if computed else "after none")
        steps = sum(call in ("after", "after none") for call in self.calls)
        return KVConnectorOutput(finished_recving={f"transfer {steps}"})

    def metrics(self):
        return {"store": {"transfers": 1}}


class Runner(ModelRunner):
    """A runner whose parts record their calls, one of which may raise."""

    def __init__(self, hooks, calls, number, raising):
        super().__init__(None, None, None, 1, hooks=hooks)
        self.number = number
        self._calls, self._raising = calls, raising

    def _call(self, name):
        self._calls.append(name)
        if self._raising == [name]:
            self._raising.clear()
            raise RuntimeError("out of memory")

    def process_outputs(self, scheduler_output=None):
        self._call("process_outputs")

    def update_requests(self, scheduler_output):
        self._call("update requests")

    def update_blocks(self, scheduler_output):
        self._call("update blocks")

    def forward(self, scheduler_output):
        self._call("forward")

    def submit(self, grammar_output):
        self._call("sample")
        return SimpleNamespace(
            always_waits=False,
            checked=False,
            batch=SimpleNamespace(requests=[SimpleNamespace(req_id="a")]),
            get_output=self._output,
        )

    def _output(self):
        self._call("output")
        return StepResult(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]])

    def wait(self):
        self._call("wait")


def make(raising=None):
    calls, raising, made = [], [raising] if raising else [], []
    connector = Connector(calls)

    def make_runner(graphs):
        made.append(Runner(connector, calls, len(made), raising))
        return made[-1]

    return RecoveringRunner(make_runner, connector), calls


def scheduled(*req_ids):
    return replace(SchedulerOutput.make_empty(), num_scheduled_tokens=dict.fromkeys(req_ids, 1))


def step(runner):
    assert runner.execute_model(scheduled("a")) is None
    return runner.sample_tokens(None).get_output()


def test_a_step_is_between_its_hooks_and_its_result_tells_of_transfers():
    runner, calls = make()
    result = step(runner)
    assert result.sampled_token_ids == [[7]]
    assert result.kv_connector_output.finished_recving == {"transfer 1"}
    assert result.metrics == {"store": {"transfers": 1}}
    assert calls == [
        ("pool made", 0),
        "process_outputs",
        ("before", ["a"], True),
        "update requests",
        "update blocks",
        "before forward",
        "forward",
        "before hand-over",
        "sample",
        "after",
        "output",
    ]


def test_a_step_without_requests_has_its_hooks_too():
    runner, calls = make()
    result = runner.execute_model(scheduled())
    assert result.req_ids == []
    assert result.kv_connector_output.finished_recving == {"transfer 1"}
    assert result.metrics == {"store": {"transfers": 1}}
    assert calls[1:] == [
        "process_outputs",
        ("before", [], True),
        "update requests",
        "update blocks",
        "before forward",
        "after",
    ]


@pytest.mark.parametrize("raising", ["process_outputs", "forward", "sample", "output"])
def test_what_became_of_transfers_is_told_when_the_step_fails(raising):
    runner, calls = make(raising)
    result = step(runner)
    assert result.failures == {"a": "the step failed: out of memory"} and result.pool_lost
    assert result.kv_connector_output.finished_recving == {"transfer 1"}
    computed = raising == "output"  # fails after the device has it
    assert (calls.count("after"), calls.count("after none")) == (computed, not computed)
    # Transfers end before the pool goes, and hear of the next one.
    assert calls.index("pool lost") < calls.index(("pool made", 1))
    assert step(runner).kv_connector_output.finished_recving == {"transfer 2"}


def test_a_step_whose_result_is_dropped_tells_of_transfers():
    runner, _ = make("output")
    assert runner.execute_model(scheduled("a")) is None
    first = runner.sample_tokens(None)
    assert runner.execute_model(scheduled("a")) is None
    assert first.get_output().pool_lost
    dropped = runner.sample_tokens(None).get_output()
    assert dropped.failures == {} and not dropped.pool_lost
    assert dropped.kv_connector_output.finished_recving == {"transfer 2"}


def test_transfers_end_before_the_engine_does():
    runner, calls = make()
    runner.close()
    assert calls[1:] == ["wait", "pool goes"]


def test_an_engine_ends_whose_device_has_failed():
    runner, calls = make("wait")
    runner.close()
    assert calls[1:] == ["wait", "pool lost"]


def test_a_step_without_requests_tells_of_a_failure_that_is_not_reported():
    runner, calls = make("forward")
    assert runner.execute_model(scheduled("a")) is None
    first = runner.sample_tokens(None)
    del calls[:]
    runner.execute_model(scheduled())
    assert calls == [("before", [], False), "update requests", "after none"]
    assert first.get_output().pool_lost


def test_transfers_end_before_an_engine_sleeps():
    runner, calls = make()
    runner.release_pool()
    assert calls[1:] == ["wait", "pool goes"]
    runner.release_pool()
    assert calls.count("pool goes") == 1
    runner.restore_pool()
    assert calls[-1] == ("pool made", 1)


@pytest.mark.parametrize("hook", ["before_step", "before_forward", "before_submit", "after_step"])
@pytest.mark.parametrize("req_ids", [["a"], []], ids=["step", "empty"])
def test_a_hook_that_raises_fails_the_step_and_not_the_engine(hook, req_ids, monkeypatch):
    if hook == "before_submit" and not req_ids:
        return  # there is nothing to hand over
    runner, calls = make()
    original = getattr(Connector, hook)

    def raise_once(*arguments, **named):
        monkeypatch.setattr(Connector, hook, original)
        raise RuntimeError("device lost")

    monkeypatch.setattr(Connector, hook, raise_once)
    result = runner.execute_model(scheduled(*req_ids))
    result = result if result is not None else runner.sample_tokens(None)
    result = result.get_output()
    assert result.pool_lost
    assert result.failures == dict.fromkeys(req_ids, "the step failed: device lost")
    assert calls.count(("pool made", 1)) == 1
    assert step(runner).sampled_token_ids == [[7]]


def test_a_step_that_is_skipped_after_a_failure_is_told_apart():
    runner, calls = make("forward")
    assert runner.execute_model(scheduled("a")) is None
    first = runner.sample_tokens(None)
    del calls[:]
    assert runner.execute_model(scheduled("a")) is None  # before anybody asks for the first
    runner.sample_tokens(None)
    assert calls == [("before", ["a"], False), "update requests", "after none"]
    assert first.get_output().pool_lost
