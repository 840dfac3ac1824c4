# SPDX-License-Identifier: Apache-2.0
"""Drafts that arrive with results are scheduled after their tokens."""

import json

import pytest
from patches.vllm_patches import doubles
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from vllm_metal.patches.vllm_patches.step_result import StepResult

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture
def scheduler(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(doubles.MODEL))
    options = {"speculative_config": NGRAM, "async_scheduling": False}
    config = doubles.arguments(str(tmp_path), **options).create_engine_config()
    found = doubles.make_scheduler(config, num_blocks=16)
    for name in "ab":
        params = SamplingParams(max_tokens=16)
        params.update_from_generation_config({}, eos_token_id=None)
        found.add_request(Request(name, [1, 2, 3], params, None))
    return found


def result(**drafts):
    """Makes results of a step in which each request sampled a token."""
    names = list(drafts)
    return StepResult(
        names,
        {name: index for index, name in enumerate(names)},
        sampled_token_ids=[[5] for _ in names],
        drafts=DraftTokenIds(names, list(drafts.values())),
    )


def test_they_stand_behind_the_tokens_that_they_follow(scheduler):
    planned = scheduler.schedule()
    assert not scheduler.schedule().num_scheduled_tokens  # both are in flight
    scheduler.update_from_output(planned, result(a=[7, 8], b=[]))
    planned = scheduler.schedule()
    assert planned.num_scheduled_tokens == {"a": 3, "b": 1}
    assert planned.scheduled_spec_decode_tokens == {"a": [7, 8]}
    kept = StepResult(["a", "b"], {"a": 0, "b": 1}, sampled_token_ids=[[7, 9], [6]])
    scheduler.update_from_output(planned, kept)
    assert list(scheduler.requests["a"].output_token_ids) == [5, 7, 9]
    assert scheduler.requests["a"].num_computed_tokens == 5


def test_requests_that_were_preempted_meanwhile_get_none(scheduler):
    planned = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.update_from_output(planned, result(a=[7, 8], b=[7, 8]))
    assert not any(request.spec_token_ids for request in scheduler.requests.values())


def test_requests_that_are_in_another_step_by_now_get_none(scheduler):
    planned = scheduler.schedule()
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3, "b": 3}
    scheduler.update_from_output(planned, result(a=[7, 8], b=[7, 8]))
    assert not scheduler.schedule().num_scheduled_tokens
