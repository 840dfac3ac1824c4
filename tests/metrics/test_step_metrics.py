# SPDX-License-Identifier: Apache-2.0
"""Transport of metrics from worker to scheduler and server."""

import pickle
from dataclasses import asdict

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_metal.metrics.step_metrics import STEP, StepMetrics, measure, take_measured
from vllm_metal.patches.vllm_patches.step_result import StepResult, send_metrics, take_metrics

METRICS = StepMetrics(0.25, 0.5, 0.4, 0.1, 3 << 30, 4 << 30, 2)


@pytest.mark.parametrize("others", [None, {"transfers": 3}], ids=["alone", "beside a connector's"])
@pytest.mark.parametrize("metrics", [METRICS, StepMetrics(0.25, None, None, None, 1, None, 0)])
def test_what_is_sent_arrives(metrics, others):
    result = StepResult(req_ids=[], req_id_to_index={}, metrics={STEP: asdict(metrics)})
    stats = SchedulerStats(kv_connector_stats=others)
    send_metrics(stats, pickle.loads(pickle.dumps(result)).metrics)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert StepMetrics(**take_metrics(arrived)[STEP]) == metrics
    assert arrived.kv_connector_stats == others  # all that vLLM's loggers find
    assert take_metrics(arrived) == {}


def test_what_is_measured_is_added_up_and_taken_once():
    take_measured()
    for value in (2, 3):
        measure("host_seconds", value)
    measure("failed_steps")
    assert take_measured() == {"host_seconds": 5, "failed_steps": 1}
    assert take_measured() == {}
