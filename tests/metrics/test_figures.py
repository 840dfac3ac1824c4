# SPDX-License-Identifier: Apache-2.0
"""Figures travel from a worker's process to the scheduler's and the server's as vLLM sends them."""

import pickle
from dataclasses import asdict

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_metal.metrics.figures import STEP, StepFigures, measure, take_measured
from vllm_metal.patches.vllm_patches.step_result import StepResult, send_figures, take_figures

FIGURES = StepFigures(0.25, 0.5, 0.4, 0.1, 3 << 30, 4 << 30, 2)


@pytest.mark.parametrize("others", [None, {"transfers": 3}], ids=["alone", "beside a connector's"])
@pytest.mark.parametrize("figures", [FIGURES, StepFigures(0.25, None, None, None, 1, None, 0)])
def test_what_is_sent_arrives(figures, others):
    result = StepResult(req_ids=[], req_id_to_index={}, figures={STEP: asdict(figures)})
    stats = SchedulerStats(kv_connector_stats=others)
    send_figures(stats, pickle.loads(pickle.dumps(result)).figures)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert StepFigures(**take_figures(arrived)[STEP]) == figures
    assert arrived.kv_connector_stats == others  # all that vLLM's loggers find
    assert take_figures(arrived) == {}


def test_what_is_measured_is_added_up_and_taken_once():
    take_measured()
    for value in (2, 3):
        measure("host_seconds", value)
    measure("failed_steps")
    assert take_measured() == {"host_seconds": 5, "failed_steps": 1}
    assert take_measured() == {}
