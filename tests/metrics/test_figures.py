# SPDX-License-Identifier: Apache-2.0
"""Figures travel from an engine's process to the server's as vLLM sends them."""

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_metal.metrics.figures import StepFigures

FIGURES = StepFigures(0.25, 0.5, 3 << 30, 4 << 30, 2)


@pytest.mark.parametrize("figures", [FIGURES, StepFigures(0.25, None, 1, None, 0)])
def test_what_is_sent_arrives(figures):
    payload = figures.for_scheduler().ec_connector_stats.data
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(ec_connector_stats=payload))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert StepFigures.take_from(arrived.scheduler_stats) == figures
    assert arrived.scheduler_stats.ec_connector_stats is None  # vLLM's loggers find nothing there
    assert StepFigures.take_from(arrived.scheduler_stats) is None


def test_what_others_report_stays():
    stats = SchedulerStats(ec_connector_stats={"transfers": 3})
    assert StepFigures.take_from(stats) is None
    assert stats.ec_connector_stats == {"transfers": 3}
