# SPDX-License-Identifier: Apache-2.0
"""Metrics as users see them: in /metrics, and in a line of the log."""

import logging
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_metal.metrics.metric import Metric
from vllm_metal.metrics.stat_logger import MetalStatLogger, logger
from vllm_metal.metrics.step_metrics import STEP, StepMetrics
from vllm_metal.patches.vllm_patches.step_result import send_metrics

GIB = 2**30
CONFIG = SimpleNamespace(model_config=SimpleNamespace(served_model_name="a model"))


@dataclass(frozen=True)
class StoreMetrics:
    num_kept: int = Metric("total", "vllm:store_kept", "Pages kept.").field()
    num_there: int = Metric("gauge", "vllm:store_there", "Pages there.").field()


@pytest.fixture
def stat_logger():
    unregister_vllm_metrics()
    yield MetalStatLogger(lambda config: {"store": StoreMetrics}, CONFIG, [0])
    unregister_vllm_metrics()


@pytest.fixture
def lines():
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # which forgets what the level before allowed
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def stats(metrics=None, drafted=None, hits=0):
    """Makes stats of a step with a looked-up prompt of 100 tokens, and 0 or 10 drafts."""
    made = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1, queries=100, hits=hits))
    if metrics is not None:
        send_metrics(made, {STEP: asdict(metrics)})
    if drafted is not None:
        made.spec_decoding_stats = SpecDecodingStats.new(10)
        made.spec_decoding_stats.observe_draft(10, drafted)
    return made


def metrics(host=0.25, device: float | None = 0.5, failed=0):
    return StepMetrics(host, device, device, device and 0.0, 3 * GIB, 4 * GIB, failed)


def metric(name, **labels):
    return REGISTRY.get_sample_value(name, {"model_name": "a model", "engine": "0", **labels})


def test_metrics(stat_logger):
    stat_logger.record(stats(metrics()), None)
    stat_logger.record(stats(metrics(host=0.75, device=None)), None)
    assert metric("vllm:metal_device_memory_bytes") == 3 * GIB
    assert metric("vllm:metal_memory_budget_bytes") == 4 * GIB
    assert metric("vllm:metal_step_host_seconds_sum") == 1
    assert metric("vllm:metal_step_host_seconds_count") == 2
    assert metric("vllm:metal_step_host_seconds_bucket", le="0.5") == 1
    assert metric("vllm:metal_step_device_seconds_sum") == 0.5
    assert metric("vllm:metal_step_device_seconds_count") == 1


def test_device_time_of_prompts_and_answers_adds_up(stat_logger):
    for kind in ("prefill", "decode"):
        assert metric("vllm:metal_device_seconds_total", kind=kind) == 0  # there before the first
    for seconds in (0.5, 0.125):
        made = StepMetrics(0.25, 0.5, seconds, 0.5 - seconds, GIB, None, 0)
        stat_logger.record(stats(made), None)
    stat_logger.record(stats(metrics(device=None)), None)
    assert metric("vllm:metal_device_seconds_total", kind="prefill") == 0.625
    assert metric("vllm:metal_device_seconds_total", kind="decode") == 0.375
    assert metric("vllm:metal_step_device_seconds_sum") == 1


def test_failed_steps_are_counted_once(stat_logger):
    assert metric("vllm:metal_failed_steps_total") == 0  # there before the first fails
    for failed in (0, 1, 1, 3):
        stat_logger.record(stats(metrics(failed=failed)), None)
    assert metric("vllm:metal_failed_steps_total") == 3


def test_images_are_counted_where_there_are_any(stat_logger):
    for images in (None, 2, 1):
        seconds = None if images is None else images / 2
        made = replace(metrics(), images_encoded=images, image_seconds=seconds)
        stat_logger.record(stats(made), None)
    assert metric("vllm:metal_images_encoded_total") == 3
    assert metric("vllm:metal_image_seconds_total") == 1.5


def test_one_line_has_memory_times_hits_and_acceptance(stat_logger, lines):
    stat_logger.record(stats(metrics(), drafted=7, hits=80), None)
    stat_logger.record(stats(metrics(host=0.75), drafted=2), None)
    stat_logger.log()
    assert lines == [
        "Engine 000: Device memory: 3.00 of 4.00 GiB, Mean host time of a step: 500.0 ms, "
        "Mean device time of a step: 500.0 ms, Failed steps: 0, Prefix cache hit rate: 40.0%, "
        "Draft acceptance rate: 45.0%"
    ]


def test_the_line_leaves_out_what_there_is_not(stat_logger, lines):
    made = SchedulerStats()
    send_metrics(made, {STEP: asdict(StepMetrics(0.25, None, None, None, 3 * GIB, None, 0))})
    stat_logger.record(made, None)
    stat_logger.log()
    assert lines == [
        "Engine 000: Device memory: 3.00 GiB, Mean host time of a step: 250.0 ms, Failed steps: 0"
    ]


def test_figures_beside_a_steps_are_shown_without_it(stat_logger, lines):
    for kept, there in ((3, 2), (5, 1)):
        made = SchedulerStats()
        send_metrics(made, {"store": asdict(StoreMetrics(kept, there))})
        stat_logger.record(made, None)
    assert (metric("vllm:store_kept_total"), metric("vllm:store_there")) == (5, 1)
    stat_logger.log()
    assert lines == []


def test_an_idle_engine_writes_no_line(stat_logger, lines):
    stat_logger.log()
    stat_logger.record(stats(metrics()), None)
    stat_logger.log()
    stat_logger.record(None, None)
    stat_logger.record(stats(), None)  # a step of which no metrics came
    stat_logger.log()
    assert len(lines) == 1
