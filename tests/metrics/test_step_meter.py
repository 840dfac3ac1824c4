# SPDX-License-Identifier: Apache-2.0
"""A step's device time goes to prompts and answers by rows, which vLLM's scheduler tells apart;
other metrics join the meter's."""

from dataclasses import replace

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_metal.metrics.step_clock import StepClock
from vllm_metal.metrics.step_meter import StepMeter, StepRows
from vllm_metal.metrics.step_metrics import STEP, StepMetrics
from vllm_metal.patches.vllm_patches.step_result import StepResult

NOTHING = StepResult(req_ids=[], req_id_to_index={})
TOKENS = StepResult(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[5]])
NO_EMBEDDING = StepResult(req_ids=["a"], req_id_to_index={"a": 0}, pooler_output=[None])
EMBEDDING = replace(NO_EMBEDDING, pooler_output=[torch.ones(4)])
LOST = StepResult(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[]], pool_lost=True)


class Output(AsyncModelRunnerOutput):
    def __init__(self, result):
        self.result = result

    def get_output(self):
        return replace(self.result)

    def get_kv_connector_output(self):
        return None


class Engine:
    """Runs consecutive steps of four seconds each."""

    def __init__(self):
        self.now = 0.0
        self.clock = StepClock(lambda: self.now)
        self.meter = StepMeter(self.clock, None, lambda: 0)

    def step(self, result, prefill, decode):
        with self.clock.preparing(), self.clock.submitting() as times:
            self.now += 1
        self.now += 3
        made = self.meter.measured(Output(result), times, StepRows(prefill, decode))
        return StepMetrics(**made.metrics[STEP])


@pytest.mark.parametrize(("prefill", "decode", "seconds"), [(9, 0, 4), (0, 9, 0), (3, 1, 3)])
def test_a_steps_time_is_divided_by_rows(prefill, decode, seconds):
    found = Engine().step(TOKENS, prefill, decode)
    assert (found.device_seconds, found.prefill_seconds) == (4, seconds)


@pytest.mark.parametrize("nothing", [NOTHING, NO_EMBEDDING])
@pytest.mark.parametrize("something", [TOKENS, EMBEDDING])
def test_chunks_without_results_are_divided_with_the_step_that_ends_them(nothing, something):
    engine = Engine()
    assert engine.step(nothing, 7, 0).device_seconds is None
    found = engine.step(something, 0, 1)
    assert (found.device_seconds, found.prefill_seconds) == (8, 7)
    assert engine.step(TOKENS, 0, 1).prefill_seconds == 0  # the chunk was counted


def test_rows_that_were_lost_take_no_time():
    engine = Engine()
    engine.step(NOTHING, 7, 0)
    engine.step(LOST, 5, 0)
    assert engine.step(TOKENS, 0, 1).prefill_seconds == 0


def test_figures_that_came_with_the_results_are_neither_lost_nor_in_doubt():
    """Figures mark the step as built; each name must be an unset field."""
    engine = Engine()
    assert engine.step(replace(TOKENS, metrics={}), 1, 1).host_seconds == 1
    for wrong in ({"no_such_figure": 1}, {"host_seconds": 1}):
        with pytest.raises(TypeError):
            engine.step(replace(TOKENS, metrics={STEP: wrong}), 1, 1)


def step(rows, outputs=(), drafts=(), left_out=None):
    """Makes scheduler output with rows by request, known requests' outputs, and drafts."""
    made = SchedulerOutput.make_empty()
    made.num_scheduled_tokens = rows
    made.total_num_scheduled_tokens = sum(rows.values())
    made.scheduled_spec_decode_tokens = {
        name: [0] * number for name, number in dict(drafts).items()
    }
    made.num_invalid_spec_tokens = left_out
    outputs = dict(outputs)
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(outputs),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(outputs),
        num_computed_tokens=[0] * len(outputs),
        num_output_tokens=list(outputs.values()),
    )
    return made


@pytest.mark.parametrize(
    ("of", "prefill", "decode"),
    [
        (step({}), 0, 0),
        (step({"new": 7}), 7, 0),
        (step({"second-chunk": 5, "last-token-of-a-prompt": 1}, {"second-chunk": 0}), 6, 0),
        (step({"a": 1, "b": 1}, {"a": 1, "b": 30}), 0, 2),
        (step({"a": 4}, {"a": 1}, {"a": 3}), 0, 4),
        (step({"a": 4}, {"a": 1}, {"a": 3}, {"a": 2}), 0, 2),
        (step({"computed-again": 40, "a": 1, "new": 3}, {"computed-again": 9, "a": 2}), 43, 1),
    ],
)
def test_rows_by_what_they_are_for(of, prefill, decode):
    assert StepRows.of(of) == StepRows(prefill, decode)


def test_shares_of_rows():
    assert StepRows().prefill_share == 0
    assert StepRows(3, 1).prefill_share == 0.75
    assert StepRows(3, 1) + StepRows(1, 3) == StepRows(4, 4)
