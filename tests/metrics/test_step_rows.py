# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are prompts', by what vLLM's scheduler says of it."""

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from vllm_metal.metrics.step_rows import StepRows


def step(rows, outputs=(), drafts=(), left_out=None):
    """Rows by request; outputs of those that are not new; drafts reserved, and not used."""
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


def test_shares():
    assert StepRows().prefill_share == 0
    assert StepRows(3, 1).prefill_share == 0.75
    assert StepRows(3, 1) + StepRows(1, 3) == StepRows(4, 4)
